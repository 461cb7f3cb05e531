"""Pictures, for which matplotlib is optional."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from dmuon.platform.files import write_bytes


def new_figure(width: float, height: float) -> Any:
    """An empty ``matplotlib.figure.Figure`` of so many inches, which knows no window and no other figure.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("drawing needs matplotlib; install it with pip install 'dmuon[bench]'") from None
    return Figure(figsize=(width, height), layout="tight")


def save_png(figure: Any, path: Path) -> None:
    """Replace the file at ``path`` by the picture, in one step."""
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=110)
    write_bytes(path, image.getvalue())
