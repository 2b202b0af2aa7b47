"""Write which Hopper kernel runs when into docs/kernels/decode_sm90.md.

    python tools/which_kernel.py [--check]

The tables between the two markers are what csrc/decode/sm90/choice.cc chooses (which_kernel.cc).
With --check nothing is written: the exit status says whether the page is up to date. Needs a C++
compiler ($CXX, or c++), no GPU and no nvcc.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/kernels/decode_sm90.md"
BEGIN = "<!-- made by tools/which_kernel.py -->\n"
END = "<!-- end of what tools/which_kernel.py made -->\n"


def tables() -> str:
    """What the selector chooses, as Markdown."""
    csrc = ROOT / "csrc"
    sources = [ROOT / "tools/which_kernel.cc", csrc / "decode/sm90/choice.cc"]
    sources.append(csrc / "decode/schedule/plan.cc")
    with tempfile.TemporaryDirectory() as directory:
        program = pathlib.Path(directory) / "which_kernel"
        command = [os.environ.get("CXX", "c++"), "-std=c++20", f"-I{csrc}", "-o", str(program)]
        subprocess.run([*command, *map(str, sources)], check=True)
        return subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout


def with_tables(page: str, made: str) -> str:
    """The page with the tables between its markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, behind = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE}: expected the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{made}\n{END}{behind}"


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    args = parser.parse_args()
    page = PAGE.read_text()
    new = with_tables(page, tables())
    if args.check:
        return 0 if new == page else 1
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
