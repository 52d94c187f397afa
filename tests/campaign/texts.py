"""The model of the campaign: a token and a KV row are functions of the tokens before them."""

from __future__ import annotations

from collections.abc import Sequence

Row = int | str | tuple[str, int]  # which prefix a row belongs to, or why it belongs to none

NEVER_WRITTEN, ZEROED, BEYOND_PROMPT = "never written", "zeroed", "beyond the remote prompt"
DRAFTED_AHEAD = "of a token that was only drafted"
NUM_OUTPUT_TOKENS = 5  # few, so that requests with one prompt share their answers, too
STOP_TOKEN = 4


def undrafted(row: Row) -> Row:
    """Row of a token on the device until the draft layer has run: all but that layer's part."""
    return "without the draft layer's part", row


def next_row(row: int, token_id: int) -> int:
    return hash((row, token_id))


def sampled_token(row: int) -> int:
    """The model's token after the one with this row."""
    return row % NUM_OUTPUT_TOKENS


class Text:
    """Tokens of a request and the rows of their KV, continued as the model does.

    Args:
        token_ids: known tokens.
        num_tokens: least length to which it is continued.
    """

    def __init__(self, token_ids: Sequence[int], num_tokens: int = 0):
        self.token_ids, self.rows = list(token_ids), []
        row = 0
        for token_id in self.token_ids:
            row = next_row(row, token_id)
            self.rows.append(row)
        while len(self.token_ids) < num_tokens:
            self.token_ids.append(sampled_token(row))
            row = next_row(row, self.token_ids[-1])
            self.rows.append(row)

    def next_token(self, position: int) -> int:
        """The model's token after those before `position`."""
        return sampled_token(self.rows[position - 1])
