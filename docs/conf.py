"""Settings of the documentation site; `make docs` builds it (docs/build.py)."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from importlib.metadata import version as version_of
from types import ModuleType

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx
from sphinx.util.inspect import signature as inspected
from sphinx.util.inspect import stringify_signature

import uvit_decay

project, author, copyright = "uvit_decay", "the authors of uvit_decay", "the authors of uvit_decay, MIT licence"
release = version = version_of("uvit_decay")

extensions = [
    "myst_nb",  # Markdown pages; notebooks, which run in every build
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",  # "Args:" and "Raises:"
    "sphinx.ext.viewcode",  # links to the source
]
exclude_patterns = ["_build", "LOG.md"]  # the log is read in the repository
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
SUBPACKAGES = {name: import_module(f"uvit_decay.{name}") for name in uvit_decay.SUBPACKAGES}
KINDS = ((inspect.isclass, "autoclass"), (inspect.isroutine, "autofunction"), (lambda _: True, "py:data"))


def directives(package: ModuleType) -> dict[str, str]:
    """Return the public names of a subpackage, without re-exported ones, and the directive that documents each."""
    modules = getattr(package, "MODULES", {})
    own = [name for name in package.__all__ if not modules.get(name, "").startswith(".")]
    named = {name: getattr(package, name) for name in own}
    return {name: next(kind for fits, kind in KINDS if fits(value)) for name, value in named.items()}


EXPORTED = {package.__name__: directives(package) for package in SUBPACKAGES.values()}
PLACES: dict[str, set[str]] = {}  # public name -> the full names of what has it
for package_name, names in EXPORTED.items():
    for public in names:
        PLACES.setdefault(public, set()).add(f"{package_name}.{public}")

autosummary_context = {
    "exported": EXPORTED,
    "short": {name: f"uvit_decay.{home}.{name}" for name, home in uvit_decay.MODULES.items() if home in SUBPACKAGES},
    "only_here": [name for name, home in uvit_decay.MODULES.items() if home not in SUBPACKAGES],
}
nitpick_ignore_regex = [
    ("py:.*", r"(?!uvit_decay\.).*"),  # other libraries' inventories would need a network
    ("py:.*", r"uvit_decay\.(\w+\.){2,}\w+"),  # types in signatures that no subpackage exports
    ("py:.*", rf"uvit_decay\.(?!({'|'.join(SUBPACKAGES)})\.)\w+\.\w+"),  # types of modules beside the subpackages
]
suppress_warnings = ["ref.python"]  # short names that two subpackages have; names that nothing has are still reported


def find_target(code: str, name: str, obj: object) -> str | None:
    """Return the full name of what `code` names in the docstring of `obj`, called `name`; None if it is not public."""
    signed = obj.__init__ if inspect.isclass(obj) else inspect.unwrap(obj)
    if code in getattr(signed, "__annotations__", {}) or code == name.rpartition(".")[2]:
        return None  # an argument or the object itself
    own_package = ".".join(name.split(".")[:2])
    places = PLACES.get(code, set())
    if f"{own_package}.{code}" in places:
        return f"{own_package}.{code}"
    return next(iter(places)) if len(places) == 1 else None


def as_code(code: str, name: str, obj: object) -> str:
    """Return the markup of `code` in the docstring of `obj`: a link if it names something public, or a literal."""
    target = find_target(code, name, obj)
    return f":py:obj:`{code} <{target}>`" if target else f"``{code}``"


def as_plain_text(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Make `x` of docstrings code, and escape what else would be markup of reStructuredText: |x|, x*, x_."""
    parts = re.split(r"`([^`]*)`(\w?)", "\n".join(lines))  # prose, code, a letter right behind it, prose ..
    parts[0::3] = [re.sub(r"(\||\*|_(?=\W|$))", r"\\\1", prose) for prose in parts[0::3]]
    parts[1::3] = [as_code(code, name, obj) for code in parts[1::3]]
    parts[2::3] = [letter and rf"\ {letter}" for letter in parts[2::3]]
    lines[:] = "".join(parts).split("\n")


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
    markup = latex2mathml.tex2mathml(node.astext(), as_block=display)
    translator.body.append(f'<div class="equation">{markup}</div>' if display else markup)
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Register these functions."""
    app.connect("autodoc-process-docstring", as_plain_text, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", own_signature)
    app.add_html_math_renderer("mathml", (as_mathml, None), (as_mathml, None))
