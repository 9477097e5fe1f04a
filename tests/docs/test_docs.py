"""The docs: links, examples and verbs hold; every dependency has its reason; the front page claims what is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/README.md", "docs/architecture.md")
INPUTS = (
    "requirements.in",
    "requirements-dev.in",
    "requirements-spark.in",
    "scripts/uv.in",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "deploy" / "docker").glob("requirements-*.in")),
)


def asked_for() -> set[str]:
    names = set()
    for source in INPUTS:
        for line in (ROOT / source).read_text().splitlines():
            match = re.match(r"[A-Za-z0-9][\w.-]*", line)
            if match:
                names.add(match[0].lower())
    return names


def test_links_examples_and_verbs_of_every_page_hold() -> None:
    check = [sys.executable, ROOT / "scripts" / "check_docs.py"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr.strip(), done.returncode) == ("", "", 0)


def test_every_dependency_has_a_sentence_that_says_why_and_no_other_has() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", (ROOT / "docs" / "dependencies.md").read_text(), re.M)
    assert {name for name, _ in rows} == asked_for()
    assert [name for name, why in rows if len(why.split()) < 4 or not why.endswith(".")] == []


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_one_title_and_leads_on(page: str) -> None:
    text = (ROOT / page).read_text()
    assert text.startswith("# ")
    assert "](" in text


def test_decisions_are_numbered_in_one_row_and_say_what_was_not_taken() -> None:
    files = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
    assert [int(path.name[:4]) for path in files] == list(range(1, len(files) + 1))
    for path in files:
        text = path.read_text()
        assert text.startswith(f"# {int(path.name[:4])}. ")
        for section in ("Context", "Decision", "Consequences", "Alternatives"):
            assert f"\n## {section}\n" in text, f"{path.name} has no {section}"


def test_every_page_of_docs_is_in_its_index() -> None:
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text()
    pages = {str(path.relative_to(docs)) for path in docs.rglob("*.md")} - {"README.md"}
    assert {page for page in pages if f"]({page})" not in index} == set()


def test_pages_name_no_place_of_somebody_s_machine() -> None:
    told = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md")]
        for match in re.finditer(r"(?<![\w.])/(home|root|Users|work)/[\w./-]*", path.read_text())
    ]
    assert told == []
