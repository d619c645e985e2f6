"""Text that streams into a terminal, wrapped between words."""

from __future__ import annotations

from collections.abc import Callable

from rich.cells import cell_len

TAB_CELLS = 8


class WordWrap:
    """Wraps text that arrives in pieces. Each piece is written immediately; a word that does not fit on its
    line is erased there and written again on the next one. Lines may also end between wide characters,
    because Chinese and Japanese have no spaces. The terminal wraps words that are longer than a line, so that
    they can be copied whole.

    ``width``: returns the cells of a line. It is called for each character, because terminals are resized.

    >>> WordWrap(lambda: 10).push("The elephants")
    'The elepha\\x1b[6D\\x1b[K\\nelephants'
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0
        self._word = ""  # since the last place where a line may end

    def push(self, text: str) -> str:
        """Returns the characters to write, with escape sequences."""
        return "".join(map(self._write, text))

    def restart(self) -> None:
        """The next text begins a line."""
        self._column, self._word = 0, ""

    def _write(self, char: str) -> str:
        match char:
            case "\n":
                self.restart()
                return "\n"
            case " ":
                return self._space(1)
            case "\t":
                return self._space(TAB_CELLS - self._column % TAB_CELLS)
            case _:
                return self._extend(char, cell_len(char))

    def _space(self, cells: int) -> str:
        self._word = ""
        if self._column + cells > self._width():
            self._column = 0
            return "\n"
        self._column += cells
        return " " * cells

    def _extend(self, char: str, cells: int) -> str:
        if cells > 1:
            self._word = ""
        word_cells = cell_len(self._word)
        if cells < 2:
            self._word += char
        if self._column + cells <= self._width():
            self._column += cells
            return char
        if word_cells == 0:
            self._column = cells
            return "\n" + char
        if word_cells >= self._column:  # it began the line
            self._column = cells
            return char
        self._column = word_cells + cells
        return f"\x1b[{word_cells}D\x1b[K\n{self._word}"
