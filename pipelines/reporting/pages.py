"""Pages from Jinja templates: the words are in `templates/`, in Markdown.

A page for a browser is made from the same Markdown, with its pictures inside.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markdown_it import MarkdownIt

from fedml_noniid.pipelines.reporting import comparison, text
from fedml_noniid.rates import in_words

TEMPLATES = Path(__file__).parent / "templates"


def render(name: str, context: Mapping[str, Any], folder: Path = TEMPLATES) -> str:
    """A template of a folder, filled in."""
    return _environment(folder).get_template(name).render(context) + "\n"


def sentences(file: str, macro: str, *values: Any) -> list[str]:
    """The sentences of a macro of a template: it writes one per line."""
    written: str = getattr(_environment(TEMPLATES).get_template(file).module, macro)(*values)
    return [line.strip() for line in written.splitlines() if line.strip()]


def html_page(title: str, page: str, pictures: Mapping[str, bytes]) -> str:
    """A page of Markdown for a browser. `pictures`: PNG by the name that the page links to.

    HTML in the Markdown is shown as text, as names of the user may look like it.
    """
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(page)
    body = body.replace("<table>", '<div class="wide" tabindex="0"><table>')
    body = body.replace("</table>", "</table></div>").replace("&lt;br&gt;", "<br>")
    for name, picture in pictures.items():
        inside = f"data:image/png;base64,{base64.b64encode(picture).decode()}"
        body = body.replace(f'src="{name}"', f'src="{inside}"')
    return render("page.html.j2", {"title": title, "body": body})


@cache
def _environment(folder: Path) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=jinja2.select_autoescape(["html.j2"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {name: getattr(text, name) for name in text.FILTERS}
    environment.globals |= {"rate": in_words}
    environment.globals |= {name: getattr(comparison, name) for name in comparison.FOR_TEMPLATES}
    return environment
