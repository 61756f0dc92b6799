"""``python -m kvq_core``: the command line."""

from kvq_core.cli import main

if __name__ == "__main__":
    main()
