"""Compile the C sources, if there is a compiler: `python -m trainers.records.native.compile`, or scripts/build-native.

Standard library only, so that it runs in an image before anything is installed. The library comes into its
place by a rename, so a process that loads it meanwhile sees the old one or the new one, whole. It is made from
nothing but the C files and headers beside this one for the plain architecture; the CPU's own instructions are looked
for when it runs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_HERE = Path(__file__).resolve().parent
FLAGS = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")
SANITIZE = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


def source_digest() -> str:
    """The first 16 hex digits of the SHA-256 of all sources, which a library of this version carries."""
    digest = hashlib.sha256()
    for path in sorted([*_HERE.glob("*.c"), *_HERE.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def compiler() -> list[str] | None:
    """The C compiler's command: $CC, or the first of cc, gcc and clang that is there."""
    named = shlex.split(os.environ.get("CC", ""))
    if named:
        return named if shutil.which(named[0]) else None
    return next(([name] for name in ("cc", "gcc", "clang") if shutil.which(name)), None)


def build(output: Path, *, flags: tuple[str, ...] = ()) -> str | None:
    """Compile to `output`; what stood in the way, or None."""
    command = compiler()
    if command is None:
        return "there is no C compiler"
    sources = sorted(str(path) for path in _HERE.glob("*.c"))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".native-", dir=output.parent) as folder:
            made = Path(folder) / output.name
            arguments = [
                *command,
                *FLAGS,
                *flags,
                f'-DTY_SOURCE="{source_digest()}"',
                *sources,
                "-o",
                str(made),
            ]
            done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
            if done.returncode:
                return f"{shlex.join(command)} failed: {done.stderr.strip()[-500:]}"
            made.replace(output)
    except (OSError, subprocess.TimeoutExpired) as e:
        return str(e)
    return None


def main() -> int:
    """Build, or say why not; the exit code is 0 either way unless --require is given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=_HERE / "libencode.so")
    parser.add_argument("--sanitize", action="store_true", help="with address and undefined behaviour checks")
    parser.add_argument("--require", action="store_true", help="fail when it can't be built")
    args = parser.parse_args()
    if os.environ.get("TRAINYARD_NATIVE") == "off":
        print("native encoder: not built, TRAINYARD_NATIVE=off", file=sys.stderr)
        return 0
    problem = build(args.output, flags=SANITIZE if args.sanitize else ())
    if problem is None:
        print(f"native encoder: built {args.output.name}", file=sys.stderr)
        return 0
    print(
        f"native encoder: not built ({problem}); records are encoded by numpy, in the same bytes",
        file=sys.stderr,
    )
    return 1 if args.require else 0


if __name__ == "__main__":
    sys.exit(main())
