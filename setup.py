"""The project's address, which pyproject.toml cannot leave open. Everything else about the package stands there."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

# Missing: the project has no public address yet. Write it here, such as "https://host/owner/dmuon", and nowhere else:
# the package's links, those in its description, and the site's (docs/hooks.py) follow.
ADDRESS = ""


def urls() -> dict[str, str]:
    if not ADDRESS:
        return {}
    return {
        "Repository": ADDRESS,
        "Documentation": f"{ADDRESS}/blob/main/docs/index.md",
        "Changelog": f"{ADDRESS}/blob/main/CHANGELOG.md",
        "Issues": f"{ADDRESS}/issues",
    }


def description() -> str:
    """The README, whose relative links lead nowhere on a package index: absolute, or their text alone."""
    text = (Path(__file__).parent / "README.md").read_text()
    image, link = re.compile(r"!\[[^]]*\]\((?!https?:)([^)]+)\)\n"), re.compile(r"\[([^]]+)\]\((?!https?:)([^)]+)\)")
    if not ADDRESS:
        return link.sub(r"\1", image.sub("", text))
    return link.sub(rf"[\1]({ADDRESS}/blob/main/\2)", image.sub(rf"![]({ADDRESS}/raw/main/\1)\n", text))


if __name__ == "__main__":
    setup(project_urls=urls(), long_description=description(), long_description_content_type="text/markdown")
