"""Write one CUDA source file for each row of the tables of kernel instances.

    python tools/kernel_instances.py DIR [FOLDER ...]

A table is an `instances.inc` beside a kernel's `launch.cuh`. Each row of it, MLA_INSTANCE(...),
becomes the source file DIR/<folder>/<arguments>.cu, which includes `launch.cuh` and holds that row.
One file a row, because nvcc compiles a file on one core. The paths are printed, one a line. CMake,
Bazel, the compiler gate and the GPU tests all call this script, so they compile the same files.
FOLDER (csrc/decode/sm90, say) limits the tables to those below it.
"""

import argparse
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent


def tables(folders: list[str]) -> list[pathlib.Path]:
    """The tables below the folders, which are relative to the root of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("instances.inc"))


def write_sources(directory: pathlib.Path, folders: list[str]) -> list[pathlib.Path]:
    """Write the source files of all rows below `folders` and return their paths.

    A file that already has the right text is left as it is, so that it is not compiled again.
    """
    sources = []
    for table in tables(folders):
        folder = table.parent.relative_to(ROOT)
        for row in re.findall(r"^MLA_INSTANCE\(.*\)$", table.read_text(), re.MULTILINE):
            name = "_".join(re.findall(r"\w+", row)[1:])
            text = (
                f"// Made from {table.relative_to(ROOT).as_posix()} by tools/kernel_instances.py.\n"
                f'#include "{folder.relative_to("csrc").as_posix()}/launch.cuh"\n\n{row}\n'
            )
            source = directory / folder / f"{name}.cu"
            source.parent.mkdir(parents=True, exist_ok=True)
            if not source.exists() or source.read_text() != text:
                source.write_text(text)
            sources.append(source)
    return sources


def main() -> None:
    """Write the files and print their paths."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("folder", nargs="*", default=["csrc"])
    args = parser.parse_args()
    for source in write_sources(args.directory.resolve(), args.folder):
        print(source.as_posix())


if __name__ == "__main__":
    main()
