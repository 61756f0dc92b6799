import click


@click.command("eval")
def evaluate():
    pass
