"""Draw the SVG pictures of README.md and docs/ into docs/pictures.

    python tools/draw_pictures.py [--check]

speed.svg shows figures that are read from the tables of docs/performance.md. With --check nothing
is written: the exit status is 1 if a picture is not what the script makes. Needs no packages.
"""

import argparse
import html
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"

# A picture paints its own background, so that its text is readable on any page.
STYLE = """
  .page { fill: #ffffff; stroke: #d0d7de; }
  text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .title { font-size: 15px; font-weight: 600; }
  .small { font-size: 11.5px; fill: #59636e; }
  .code { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: 12px; }
  .strong { font-weight: 600; }
  .line { stroke: #59636e; stroke-width: 1.3; fill: none; }
  .box { stroke: #59636e; stroke-width: 1; }
  .ours { fill: #1a7f64; } .theirs { fill: #b4bcc5; }
  .a { fill: #cfe8df; } .b { fill: #d6e4f7; } .c { fill: #fbe3c6; } .new { fill: #f3c4c0; }
  .free { fill: #f1f3f5; } .plain { fill: #ffffff; }
  @media (prefers-color-scheme: dark) {
    .page { fill: #151b23; stroke: #3d444d; }
    text { fill: #f0f6fc; } .small { fill: #a6b0bb; }
    .line, .box { stroke: #9198a1; }
    .ours { fill: #3fb68b; } .theirs { fill: #656c76; }
    .a { fill: #1d4d3e; } .b { fill: #1f3f6b; } .c { fill: #5e4319; } .new { fill: #6e2f2a; }
    .free { fill: #262c36; } .plain { fill: #151b23; }
  }
"""


class Picture:
    """An SVG whose elements are appended one after another."""

    def __init__(self, width: int, height: int, title: str):
        """Start an empty picture."""
        self.width, self.height, self.title = width, height, title
        self.elements: list[str] = []

    def text(
        self, x: float, y: float, content: str, style: str = "", anchor: str = "start"
    ) -> None:
        """Add a line of text."""
        self.elements.append(
            f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">'
            f"{html.escape(content, quote=False)}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, style: str, *lines: str) -> None:
        """Draw a box with lines of text in its middle."""
        self.bar(x, y, width, height, f"box {style}")
        top = y + height / 2 + 4.5 - 8 * (len(lines) - 1)
        for i, line in enumerate(lines):
            self.text(x + width / 2, top + 16 * i, line, anchor="middle")

    def bar(self, x: float, y: float, width: float, height: float, style: str) -> None:
        """Add a rectangle."""
        self.elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:.4g}" height="{height:g}" rx="3"'
            f' class="{style}"/>'
        )

    def arrow(self, *points: tuple[float, float]) -> None:
        """Add a line through points, with a head at the last one."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.elements.append(f'<polyline points="{path}" class="line" marker-end="url(#head)"/>')

    def svg(self) -> str:
        """Return the file's text."""
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
            ' orient="auto"><path d="M0,0 L8,4 L0,8 Z" fill="#768390"/></marker>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}"'
                f' width="{self.width}" height="{self.height}" role="img">',
                f"<title>{html.escape(self.title)}</title>",
                f"<style>{STYLE}</style>",
                f"<defs>{head}</defs>",
                f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{self.height - 1}" rx="8"'
                ' class="page"/>',
                *self.elements,
                "</svg>\n",
            ]
        )


def table(markdown: str, header: str) -> list[list[str]]:
    """Return the cells of the table whose header line starts with `header`, header first."""
    lines = markdown[markdown.index(f"\n{header}") + 1 :].split("\n\n")[0].splitlines()
    rows = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def commit(markdown: str, figures: str) -> str:
    """Return the first commit that the page names for `figures`."""
    (row,) = (row for row in table(markdown, "| figures | commit") if row[0].startswith(figures))
    found = re.match(r"[0-9a-f]{7}", row[1])
    assert found, row
    return found.group()


Pair = tuple[str, float, float]


def decode_times(markdown: str) -> list[Pair]:
    """Return calls of 4096 tokens with our time and FlashMLA's."""
    rows = {row[0]: row for row in table(markdown, "| batch x tokens | 16 heads | F |")}
    return [
        (f"{heads} heads, {call}", float(rows[call][column]), float(rows[call][column + 1]))
        for heads, column in ((16, 1), (64, 3), (128, 5))
        for call in ("1 x 4096", "8 x 4096", "32 x 4096")
    ]


MIXED_STEPS = (
    "a chunk of 64 from an empty cache",
    "a chunk of 64 after 2048",
    "a chunk of 256 after 2048",
    "four chunks of 256 after 2048",
    "four chunks of 512 after 2048",
    "64 sequences, log-normal around 2048, one new token",
)


def mixed_times(markdown: str) -> list[Pair]:
    """Return mixed steps of 16 heads with our time and FlashInfer's."""
    rows = {row[0]: row[1] for row in table(markdown, "| step | 16 heads, FlashInfer |")}
    pairs = []
    for step in MIXED_STEPS:
        ours, theirs = rows[step].split(", ")
        pairs.append((step, float(ours), float(theirs)))
    return pairs


def draw_bars(
    picture: Picture, x: float, y: float, pairs: list[Pair], pitch: float, length: float
) -> None:
    """Draw two bars for each pair, from `x` on, all to one scale."""
    largest = max(max(ours, theirs) for _, ours, theirs in pairs)
    for i, (label, ours, theirs) in enumerate(pairs):
        top = y + i * pitch
        picture.text(x, top, label)
        for j, (time, style) in enumerate(((ours, "ours"), (theirs, "theirs"))):
            width = max(time / largest * length, 2)
            picture.bar(x, top + 6 + 13 * j, width, 11, style)
            strong = "small strong" if time == min(ours, theirs) else "small"
            picture.text(x + width + 5, top + 15.5 + 13 * j, f"{time:g}", strong)


def draw_legend(picture: Picture, x: float, y: float, peer: str) -> None:
    """Say which bar is whose."""
    picture.bar(x, y - 10, 12, 11, "ours")
    picture.text(x + 17, y, "jax_mla", "small")
    picture.bar(x + 72, y - 10, 12, 11, "theirs")
    picture.text(x + 89, y, peer, "small")


def draw_speed() -> Picture:
    """Draw our times beside FlashMLA's and FlashInfer's."""
    markdown = (ROOT / "docs" / "performance.md").read_text()
    decode, mixed = decode_times(markdown), mixed_times(markdown)
    picture = Picture(860, 530, "jax_mla beside FlashMLA and FlashInfer, microseconds for a call")
    picture.text(24, 32, "One decode call: batch x tokens", "title")
    draw_legend(picture, 24, 54, "FlashMLA (its schedule not counted)")
    draw_bars(picture, 24, 80, decode, 48, 330)
    picture.text(446, 32, "One mixed step: 64 decoding sequences and ...", "title")
    draw_legend(picture, 446, 54, "FlashInfer (its plan not counted)")
    draw_bars(picture, 446, 80, mixed, 48, 340)
    notes = (
        "Microseconds, less is better. bf16, rows of 512 + 64, pages of 64.",
        f"Left: one H200, commit {commit(markdown, 'the table of one H200')}.",
        f"Right: one H200, 16 heads, commit {commit(markdown, 'mixed steps on an H200')}.",
        "Sequences have 4096 tokens. The last step has those of its name, and no chunk.",
        "Method, all shapes and caveats: docs/performance.md",
    )
    for i, note in enumerate(notes):
        picture.text(446, 396 + 20 * i, note, "small")
    return picture


def draw_cache() -> Picture:
    """Draw the cache: its pages, a page table, and a row."""
    picture = Picture(860, 330, "The cache and its pages")
    picture.text(24, 32, "The pool: pages of page_size rows, a row for each token", "title")
    owners = ["a", "b", "a", "free", "c", "a", "b", "free"]
    for page, owner in enumerate(owners):
        picture.box(24 + 102 * page, 48, 94, 44, owner, f"page {page}")
    picture.text(
        24,
        128,
        "page_table[b]: the pages of sequence b, in order; seq_lens[b]: how many rows count",
        "title",
    )
    tables = (
        ("a", "sequence 0", (0, 2, 5), "seq_lens 150"),
        ("b", "sequence 1", (6, 1, None), "seq_lens 100"),
        ("c", "sequence 2", (4, None, None), "seq_lens 7"),
    )
    for i, (style, name, pages, length) in enumerate(tables):
        y = 144 + 34 * i
        picture.text(24, y + 19, name)
        for j, page in enumerate(pages):
            picture.box(
                112 + 62 * j,
                y,
                56,
                28,
                "free" if page is None else style,
                "-" if page is None else str(page),
            )
        picture.text(312, y + 19, length, "code")
    picture.text(
        420, 163, "Page size 64: 150 rows are pages 0 and 2, and 22 rows of page 5.", "small"
    )
    picture.text(420, 197, "Rows past seq_lens are never read, whatever they hold.", "small")
    picture.text(420, 231, "Places past the last page are not read.", "small")
    picture.text(24, 278, "A row")
    picture.box(112, 260, 420, 30, "b", "ckv: the latent, 512 values (RMSNorm applied)")
    picture.box(534, 260, 180, 30, "c", "kpe: 64 values, rotated")
    picture.text(
        112,
        312,
        "One row serves all heads, as key and as value. In bf16 it has 1,152 bytes a layer.",
        "small",
    )
    return picture


def draw_absorption() -> Picture:
    """Draw where W_UK and W_UV go."""
    picture = Picture(
        860, 400, "Absorption: the projections move from the keys to the query and the result"
    )
    picture.text(24, 32, "As the paper writes it: keys and values of every head", "title")
    picture.box(24, 50, 150, 40, "b", "latents of all tokens")
    picture.box(234, 50, 140, 40, "plain", "W_UK, W_UV")
    picture.box(434, 50, 190, 40, "free", "k_nope, v of every head")
    picture.box(684, 50, 152, 40, "plain", "attention")
    picture.arrow((174, 70), (231, 70))
    picture.arrow((374, 70), (431, 70))
    picture.arrow((624, 70), (681, 70))
    picture.text(
        24,
        112,
        "Work for every cached token and head, before any score. prefill does it for long prompts.",
        "small",
    )
    picture.text(24, 160, "Absorbed: the cache is used as it lies", "title")
    picture.box(24, 178, 150, 40, "plain", "q_nope of the layer")
    picture.box(234, 178, 140, 40, "plain", "W_UK")
    picture.box(434, 178, 190, 40, "a", "q_nope for decode: 512")
    picture.box(684, 178, 152, 84, "a", "jax_mla.decode")
    picture.arrow((174, 198), (231, 198))
    picture.arrow((374, 198), (431, 198))
    picture.arrow((624, 198), (681, 198))
    picture.box(434, 230, 190, 32, "b", "cache: 512 + 64")
    picture.arrow((624, 246), (681, 246))
    picture.box(684, 304, 152, 40, "a", "out: 512 a head")
    picture.box(434, 304, 190, 40, "plain", "W_UV")
    picture.box(234, 304, 140, 40, "plain", "values of the heads")
    picture.box(24, 304, 150, 40, "plain", "W_O")
    picture.arrow((760, 262), (760, 301))
    picture.arrow((684, 324), (627, 324))
    picture.arrow((434, 324), (377, 324))
    picture.arrow((234, 324), (177, 324))
    picture.text(
        24,
        372,
        "Two small products a new token. The scale stays (128 + 64) ** -0.5, not 576 ** -0.5.",
        "small",
    )
    return picture


def draw_mixed_step() -> Picture:
    """Draw a mixed step: new tokens, cu_q_lens, seq_lens."""
    picture = Picture(860, 300, "A mixed step")
    picture.text(
        24,
        32,
        "One call of ragged_paged_attention: decoding sequences beside a chunk of a prompt",
        "title",
    )
    cached = (
        (0, "a", 9, 1, "0 decodes"),
        (1, "b", 5, 1, "1 decodes"),
        (2, "c", 3, 4, "2 reads a chunk"),
    )
    for sequence, style, old, new, name in cached:
        y = 56 + 34 * sequence
        picture.text(24, y + 17, name)
        for i in range(old + new):
            is_new = i >= old
            picture.box(140 + 36 * i, y, 32, 26, "new" if is_new else style)
        picture.text(
            140 + 36 * (old + new) + 10, y + 17, f"seq_lens[{sequence}] = {old + new}", "code"
        )
    picture.bar(660, 60, 14, 14, "box new")
    picture.text(682, 72, "new tokens of this step")
    for i, style in enumerate("abc"):
        picture.bar(660 + 20 * i, 84, 14, 14, f"box {style}")
    picture.text(722, 96, "in the cache already")
    picture.text(24, 194, "q, ckv, kpe")
    for i, style in enumerate(("a", "b", "c", "c", "c", "c")):
        picture.box(140 + 60 * i, 176, 56, 28, style, f"{i}")
    picture.text(510, 194, "the new tokens of all sequences, one behind the other", "small")
    picture.text(24, 236, "cu_q_lens")
    for i, value in enumerate((0, 1, 2, 6)):
        picture.box(140 + 60 * i, 218, 56, 28, "plain", str(value))
    picture.text(510, 236, "sums, not lengths: 1, then 1 + 1, then 1 + 1 + 4", "small")
    picture.text(
        24,
        276,
        "seq_lens counts the new tokens too. A token attends to its sequence up to its own row.",
        "small",
    )
    return picture


LAYER = "| batch x context | projections |"  # the header of a table of docs/serving.md
OURS = ("index_append", "index_topk", "append", "sparse_attention")


def layer_rows(markdown: str) -> list[tuple[str, dict[str, float]]]:
    """Return the rows of a layer by part: what is timed, and the microseconds of each part."""
    if LAYER not in markdown:
        return []
    header, *rows = table(markdown, LAYER)
    parts = header[1 : header.index("sum")]
    return [(row[0], dict(zip(parts, map(float, row[1:]), strict=False))) for row in rows]


def draw_layer(rows: list[tuple[str, dict[str, float]]]) -> Picture:
    """Draw a bar for each row of a layer by part; jax_mla's parts are coloured."""
    styles: dict[str, str] = dict(zip(OURS, ("ours", "a", "c", "new"), strict=True))
    picture = Picture(860, 130 + 44 * len(rows), "A decode step of a layer, by part")
    picture.text(24, 32, "A layer of DeepSeek-V3.2, microseconds by part: batch x context", "title")
    x = 24.0
    for part, style in (*styles.items(), ("projections, output, feed-forward", "theirs")):
        picture.bar(x, 44, 12, 11, style)
        picture.text(x + 17, 54, part, "small")
        x += 40 + 6.2 * len(part)
    largest = max(sum(parts.values()) for _, parts in rows)
    for i, (label, parts) in enumerate(rows):
        top, x = 84 + 44 * i, 150.0
        picture.text(24, top + 16, label)
        total, ours = sum(parts.values()), sum(parts[part] for part in OURS)
        for part, time in parts.items():
            width = time / largest * 560
            picture.bar(x, top, max(width, 0.5), 22, styles.get(part, "theirs"))
            x += width
        picture.text(x + 6, top + 15, f"{total:.0f}, jax_mla {ours / total:.0%}", "small strong")
    picture.text(
        24,
        100 + 44 * len(rows),
        "One H200, bfloat16, one new token a sequence. Method: benchmarks/README.md",
        "small",
    )
    return picture


DRAW = {
    "speed": draw_speed,
    "cache": draw_cache,
    "absorption": draw_absorption,
    "mixed_step": draw_mixed_step,
}


def main() -> int:
    """Write or check all pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    PICTURES.mkdir(exist_ok=True)
    stale, pictures = [], dict(DRAW)
    rows = layer_rows((ROOT / "docs" / "serving.md").read_text())
    if rows:  # until the layer has been timed there is nothing to draw
        pictures["layer"] = lambda: draw_layer(rows)
    for name, draw in pictures.items():
        path, svg = PICTURES / f"{name}.svg", draw().svg()
        if not path.exists() or path.read_text() != svg:
            stale.append(path.name)
            if not check:
                path.write_text(svg)
    if check and stale:
        print("run tools/draw_pictures.py:", *stale, file=sys.stderr)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
