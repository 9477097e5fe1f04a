"""Check every Markdown file of the repo, in seconds.

- Relative links lead to files that are there, and to headings that are in them.
- A fenced block after `<!-- file: dags/x.py -->` is that file, word for word; after `<!-- part: dags/x.py -->`
  its lines stand in that file one after the other. So every example is one that the tests run.
- Other Python blocks compile, and their `>>>` examples give what they say.
- `make VERB` and `trainyard COMMAND` in code name verbs and commands that exist.
"""

from __future__ import annotations

import doctest
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
_FENCE = re.compile(
    r"^(?:<!-- (?P<how>file|part): (?P<source>\S+) -->\n\s*)?```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")
_HEADING = re.compile(r"^#+\s+(.*)$", re.MULTILINE)
_SHELL = ("sh", "bash", "shell", "console", "")


@dataclass(frozen=True)
class Fence:
    """A fenced block and what it says about where it is from."""

    line: int
    language: str
    text: str
    how: str
    source: str


def fences(text: str) -> Iterator[Fence]:
    """The fenced blocks of a page."""
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Fence(line, match["language"], match["text"], match["how"] or "", match["source"] or "")


def faults_of(path: Path, repo: Path, verbs: set[str], commands: set[str]) -> Iterator[str]:
    """What is wrong with one page, a line each."""
    text = path.read_text()
    where = path.relative_to(repo)
    prose = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for match in _LINK.finditer(prose):
        if fault := _link_fault(match["target"], path):
            yield f"{where}:{prose.count(chr(10), 0, match.start()) + 1}: {fault}"
    for fence in fences(text):
        for fault in (*_source_faults(fence, repo), *_python_faults(fence)):
            yield f"{where}:{fence.line}: {fault}"
    shell = [fence.text for fence in fences(text) if fence.language in _SHELL]
    for code in (
        *_CODE.findall(prose),
        *(line.strip().removeprefix("$ ") for block in shell for line in block.splitlines()),
    ):
        for program, known in (("make", verbs), ("trainyard", commands)):
            match = re.match(rf"{program} ([a-z][a-z-]*)(?=\s|$)", code)
            if match and match[1] not in known:
                yield f"{where}: `{program} {match[1]}` is not there"


def _link_fault(target: str, path: Path) -> str | None:
    if re.match(r"[a-z]+:", target):
        return None
    file, _, anchor = target.partition("#")
    goal = (path.parent / file).resolve() if file else path
    if not goal.exists():
        return f"{target} leads nowhere"
    if (
        anchor
        and goal.suffix == ".md"
        and anchor not in {_slug(h) for h in _HEADING.findall(goal.read_text())}
    ):
        return f"{target}: no such heading"
    return None


def _slug(heading: str) -> str:
    """A heading's anchor as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def _source_faults(fence: Fence, repo: Path) -> Iterator[str]:
    if not fence.source:
        return
    file = repo / fence.source
    if not file.exists():
        yield f"{fence.source} is not there"
    elif fence.how == "file" and file.read_text().strip() != fence.text.strip():
        yield f"the block is not {fence.source} as it is"
    elif fence.how == "part" and fence.text.strip("\n") not in file.read_text():
        yield f"the block does not stand in {fence.source}"


def _python_faults(fence: Fence) -> Iterator[str]:
    if fence.language not in ("python", "pycon"):
        return
    if ">>>" in fence.text:
        test = doctest.DocTestParser().get_doctest(fence.text, {}, "example", None, 0)
        told: list[str] = []
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=told.append)
        if told:
            yield "".join(told).strip()
        return
    try:
        compile(textwrap.dedent(fence.text), "example", "exec", dont_inherit=True)
    except SyntaxError as error:
        yield f"the block does not compile: {error}"


def known_verbs(repo: Path) -> set[str]:
    """The Makefile's targets."""
    return set(re.findall(r"^([a-z][a-z-]*):", (repo / "Makefile").read_text(), re.MULTILINE))


def known_commands() -> set[str]:
    """The commands of the command line."""
    from trainyard.cli import parser

    return {
        name for action in parser()._actions if isinstance(action.choices, dict) for name in action.choices
    }


def pages(repo: Path) -> list[Path]:
    """Every Markdown file under version control, or about to be."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "*.md"]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, check=False)
    if done.returncode:  # an unpacked archive is no clone
        return [
            page
            for page in repo.rglob("*.md")
            if not any(p.startswith(".") for p in page.relative_to(repo).parts)
        ]
    return [repo / name for name in done.stdout.split("\0") if name and (repo / name).exists()]


def main() -> int:
    """Print what is wrong; 1 when something is."""
    verbs, commands = known_verbs(REPO), known_commands()
    told = [fault for page in pages(REPO) for fault in faults_of(page, REPO, verbs, commands)]
    print("\n".join(told))
    return bool(told)


if __name__ == "__main__":
    sys.exit(main())
