"""Names and numbers as text that a terminal cannot take for commands.

Names of tenants come from clients. A control character among them could move the cursor, set the
title or the clipboard of the terminal; a bidirectional one could reorder a line.
"""

from __future__ import annotations

import time
import unicodedata

from rich.cells import cell_len

MAX_CHARS = 512
"""Characters of a name that are looked at."""
MAX_MARKS = 2
"""Combining marks on one character; more would cover other lines."""
_CAUSES = {
    "executor_busy": "the running step",
    "token_budget": "token budget",
    "prefill_cap": "prefill cap",
    "running_limit": "running limit",
    "kv_blocks": "KV blocks",
    "kv_quota": "KV quota",
    "tenant_share": "tenant share",
    "tier_order": "tier or priority",
    "deadline_order": "deadlines",
    "engine_restart": "engine restart",
    "unrecorded": "not recorded",
}


def clean(text: str) -> str:
    """Return one line of text in which every character is visible or a space."""
    found: list[str] = []
    num_marks = 0
    for char in unicodedata.normalize("NFC", text[:MAX_CHARS]):
        kind = unicodedata.category(char)
        num_marks = num_marks + 1 if kind[0] == "M" else 0
        if num_marks > MAX_MARKS:
            continue
        # C: control, format (bidirectional and invisible), private and unassigned characters.
        is_hidden = kind[0] == "C" or kind in ("Zl", "Zp")
        found.append("\N{REPLACEMENT CHARACTER}" if is_hidden else " " if kind == "Zs" else char)
    return "".join(found)


def fit(text: str, width: int) -> str:
    """Return clean text that takes `width` cells at most; an ellipsis stands for what is cut."""
    text = clean(text)
    if cell_len(text) <= width:
        return text
    kept, num_cells = list[str](), 0
    for char in text:
        num_cells += cell_len(char)
        if num_cells > width - 1:
            break
        kept.append(char)
    return "".join(kept) + "…" if width > 0 else ""


def left(text: str, width: int) -> str:
    """Return clean text of exactly `width` cells, at the left."""
    text = fit(text, width)
    return text + " " * (width - cell_len(text))


def right(text: str, width: int) -> str:
    """Return clean text of exactly `width` cells, at the right."""
    text = fit(text, width)
    return " " * (width - cell_len(text)) + text


def cause_name(cause: str) -> str:
    """Return a cause as the dashboard names it."""
    return _CAUSES.get(cause, cause)


def tenant_name(name: str | None) -> str:
    """Return what is shown for a tenant."""
    if name is None:
        return "-"
    return name or "(no tenant)"


def count(value: float) -> str:
    """Return a number in at most 7 characters."""
    if value < 1e6:
        return f"{value:,.0f}"
    return f"{value / 1e6:,.1f}M" if value < 1e9 else f"{value / 1e9:,.0f}G"


def duration(seconds: float | None) -> str:
    """Return a time in at most 8 characters."""
    if seconds is None:
        return "-"
    if seconds < 0.0995:
        return f"{1000 * seconds:.1f} ms" if seconds < 0.00995 else f"{1000 * seconds:.0f} ms"
    if seconds < 9_999.5:
        return f"{seconds:,.{2 if seconds < 9.95 else 1 if seconds < 99.5 else 0}f} s"
    return f"{seconds / 3600:,.{1 if seconds < 359_820 else 0}f} h"


def clock(at: float) -> str:
    """Return a time of day."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return "-"


def share(value: float | None, digits: int = 0) -> str:
    """Return a share as a percentage."""
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def bar(value: float, most: float, width: int, is_ascii: bool) -> str:
    """Return a bar of `width` cells that is full at `most`."""
    part = 0.0 if most <= 0.0 else min(1.0, max(0.0, value / most))
    if is_ascii:
        return ("#" * round(part * width)).ljust(width)
    eighths = round(8 * part * width)
    rest = " ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else ""
    return ("█" * (eighths // 8) + rest).ljust(width)
