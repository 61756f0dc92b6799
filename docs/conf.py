"""The documentation site: ``hatch run docs`` builds it into ``docs/_build``. The pages are Markdown that reads well on its own."""

from importlib import metadata

project = "kvq"
author = "the kvq authors"
project_copyright = "the kvq authors; Apache-2.0"
release = metadata.version("kvq-core")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build", "dev"]
myst_enable_extensions = ["attrs_block", "colon_fence"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = "kvq"
pygments_dark_style = "github-dark"
html_static_path = ["_static"]
html_css_files = ["kvq.css"]
html_theme_options = {"navigation_with_keys": True}
copybutton_exclude = ".linenos, .gp, .go"  # a console block's prompt and output are not copied

toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# Other projects' names are not linked: their inventories would have to be fetched, and the build needs no network.
nitpick_ignore_regex = [("py:.*", r"(torch|transformers|collections|fractions|types|os|pathlib|_pytest)\..*")]
nitpick_ignore = [
    # Type variables: register_backend and enable return what they are given.
    ("py:class", "B"),
    ("py:class", "kvq_transformers.switch.M"),
    # Names of unions of types, and a type variable, in signatures.
    ("py:class", "M"),
    ("py:class", "Modes"),
    ("py:class", "Scales"),
    ("py:class", "Smoothings"),
    ("py:class", "Staged"),
    # The sums and sizes inside a ModeResult; its properties are what is public.
    ("py:class", "Mapping[str"),
    ("py:class", "Tally"),
    ("py:class", "kvq_core.evaluation.results.Sizes"),
    ("py:class", "kvq_core.evaluation.results.Tally"),
    # Imported for annotations only, where autodoc cannot tell its module.
    ("py:class", "ResidualStep"),
    ("py:class", "LaunchRecord"),
]
