"""A hook of mkdocs: Sphinx roles in docstrings (``:meth:`~lightstep.Strategy.load```) are shown as code (``load``)."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>(~[\w.]*\.)?(.*?)</code>")


def on_page_content(html: str, **_: Any) -> str:
    return _ROLE.sub(r"<code>\2</code>", html)
