"""Text in LaTeX's own characters."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pylatexenc.latexencode import UnicodeToLatexEncoder


def escaped(text: str) -> str:
    """`text` for LaTeX; a character that it has no command for stays, for engines that read UTF-8."""
    return str(_encoder().unicode_to_latex(text))


@functools.cache
def _encoder() -> UnicodeToLatexEncoder:
    from pylatexenc.latexencode import UnicodeToLatexEncoder

    return UnicodeToLatexEncoder(unknown_char_policy="keep", unknown_char_warning=False)
