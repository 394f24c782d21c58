"""Settings of the documentation site; `make docs` builds it (docs/build.py)."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from importlib.metadata import version as version_of

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx
from sphinx.util.inspect import signature as inspected
from sphinx.util.inspect import stringify_signature

project, author, copyright = "uvit_decay", "the authors of uvit_decay", "the authors of uvit_decay, MIT licence"
release = version = version_of("uvit_decay")

extensions = [
    "myst_nb",  # Markdown pages; notebooks, which run in every build
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",  # "Args:" and "Raises:"
]
exclude_patterns = ["_build"]
html_theme, html_title = "furo", "uvit_decay"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = html_show_sphinx = False
html_math_renderer = "mathml"  # see `setup`
pygments_style, pygments_dark_style = "friendly", "github-dark"

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3  # links to headings, as code-hosting sites make them
myst_update_mathjax = False
nb_execution_mode, nb_execution_raise_on_error, nb_execution_timeout = "force", True, 600
nb_execution_in_temp = True  # notebooks write runs into their folder
nb_merge_streams, nb_output_stderr = True, "remove"  # progress bars, and warnings of what is not installed

autosummary_generate = True
autodoc_inherit_docstrings = False  # those of Lightning are not ours
templates_path = ["_templates"]
autodoc_member_order = "bysource"
add_module_names = False
DOCUMENTED = "decay|nn|diffusion|data|metrics|representations|evaluation|tasks|callbacks|checkpoint|hub"
PACKAGES = [import_module(f"uvit_decay.{name}") for name in DOCUMENTED.split("|")]
EXPORTED = {p.__name__: {name: getattr(p, name) for name in getattr(p, "__all__", ())} for p in PACKAGES}
KINDS = ((inspect.isclass, "class"), (inspect.isfunction, "function"), (lambda _: True, "data"))
autosummary_context = {
    "exported": {
        package: {name: next(kind for fits, kind in KINDS if fits(obj)) for name, obj in names.items()}
        for package, names in EXPORTED.items()
    }
}
nitpick_ignore_regex = [
    ("py:.*", rf"(?!uvit_decay\.({DOCUMENTED})\.).*"),  # other libraries' inventories would need a network
    ("py:.*", r".*\._\w+"),  # private
    ("py:class", r".*\.(State|Net)"),  # names for types
]
suppress_warnings = ["ref.python"]  # short names that two modules have; names that nothing has are still reported


def as_plain_text(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Make `x` of docstrings a literal, and escape what else would be markup of reStructuredText: |x|, x*, x_."""
    parts = re.split(r"`([^`]*)`(\w?)", "\n".join(lines))  # prose, code, a letter right behind it, prose ..
    parts[0::3] = [re.sub(r"(\||\*|_(?=\W|$))", r"\\\1", prose) for prose in parts[0::3]]
    parts[1::3] = [f"``{code}``" for code in parts[1::3]]
    parts[2::3] = [letter and rf"\ {letter}" for letter in parts[2::3]]
    lines[:] = "".join(parts).split("\n")


def only_once(app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object) -> bool | None:
    """Leave out of a module's page what the page of its package has."""
    exported = (obj is other for names in EXPORTED.values() for other in names.values())
    return (what == "module" and any(exported)) or None


def own_signature(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Return the arguments of a class whose base hides them by a `__new__` that takes anything."""
    if what == "class" and signature == "(*args, **kwargs)":
        given = inspected(obj.__init__, bound_method=True)
        signature = stringify_signature(given, show_return_annotation=False, unqualified_typehints=True)
    return signature, returns


def as_mathml(translator: object, node: nodes.math | nodes.math_block) -> None:
    """Write an equation as MathML, which browsers show without scripts and fonts from elsewhere."""
    display = isinstance(node, nodes.math_block)
    translator.body.append(latex2mathml.tex2mathml(node.astext(), as_block=display))
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Register these functions."""
    app.connect("autodoc-process-docstring", as_plain_text, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", own_signature)
    app.connect("autodoc-skip-member", only_once)
    app.add_html_math_renderer("mathml", (as_mathml, None), (as_mathml, None))
