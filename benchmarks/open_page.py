"""Open the page of an explanation once in headless Chromium: look, press its keys, and say what came of it.

    python benchmarks/open_page.py [PAGE.html] [--out FOLDER]

Without a page it explains GPT-2 first. Writes a screenshot in colour and one in grey. Exit codes: 0 the page works;
1 it doesn't; 2 no Chromium is installed, or the page can't be read.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from jremat.terminal.command_line import exit_code, fail

PROGRAM = "open_page"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MOST_BYTES = 2_000_000

# Presses the keys as a user would, and leaves in the document what the page said to each.
PROBE = """
<script>
(() => {
  const said = { errors: window.pageErrors };
  const chart = document.querySelector(".chart");
  const press = (key) => {
    chart.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
    return Number(chart.getAttribute("aria-valuenow"));
  };
  chart.focus();
  said.focused = document.activeElement === chart;
  said.outline = getComputedStyle(chart).outlineStyle;
  said.start = Number(chart.getAttribute("aria-valuenow"));
  said.home = press("Home");
  said.right = press("ArrowRight");
  said.page = press("PageDown");
  said.end = press("End");
  said.last = Number(chart.getAttribute("aria-valuemax"));
  said.beyond = press("ArrowRight");
  said.peak = press("p");
  said.text = chart.getAttribute("aria-valuetext");
  said.areas = document.querySelectorAll(".chart svg path[data-line]").length;
  said.rows = document.querySelectorAll("#values tbody tr").length;
  said.alive = document.querySelectorAll(".alive tbody tr").length;
  const box = chart.getBoundingClientRect();
  chart.dispatchEvent(new PointerEvent("pointermove", {
    clientX: box.left + box.width / 2, clientY: box.top + box.height * .8, bubbles: true }));
  said.tip = document.querySelector(".tip").hidden ? "" : document.querySelector(".tip").textContent;
  press("p");
  chart.blur();
  const mark = document.createElement("pre");
  mark.id = "probe"; mark.hidden = true; mark.textContent = JSON.stringify(said);
  document.body.append(mark);
})();
</script>
"""
WATCH = "<script>window.pageErrors = []; addEventListener('error', (e) => pageErrors.push(e.message));</script>"


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", nargs="?", type=Path, help="a page of jremat explain; without one, GPT-2's")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "page", help="a folder for the screenshots")
    flags = parser.parse_args()
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        return fail(PROGRAM, f"no Chromium is installed; looked for {', '.join(BROWSERS)}")
    if flags.page and not flags.page.is_file():
        return fail(PROGRAM, f"no file {flags.page}")
    with tempfile.TemporaryDirectory() as folder:
        page = flags.page or explained(Path(folder) / "gpt2.html")
        flags.out.mkdir(parents=True, exist_ok=True)
        return report(browser, page, flags.out, Path(folder))


def explained(path: Path) -> Path:
    """GPT-2's page."""
    command = ["scripts/explain.py", "--policy", "save_only_matmuls", "--against", "full", "--html", str(path)]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return path


def report(browser: str, page: Path, out: Path, scratch: Path) -> int:
    """Open it, look at it, press its keys; 0 if all is as it should be."""
    text = page.read_text(encoding="utf-8")
    grey = scratch / "grey.html"
    grey.write_text(text.replace("</head>", "<style>html{filter:grayscale(1)}</style></head>"), encoding="utf-8")
    for name, shown in (("explain", page), ("explain-grey", grey)):
        shot = out / f"{name}.png"
        run(browser, scratch, shown, f"--screenshot={shot.absolute()}", "--window-size=1320,4200")
        print(f"picture {shot}")
    probed = scratch / "probed.html"
    head, _, tail = text.rpartition("</body>")
    probed.write_text(head.replace("<head>", f"<head>{WATCH}") + PROBE + "</body>" + tail, encoding="utf-8")
    dom = run(browser, scratch, probed, "--dump-dom").stdout
    found = re.search(r'<pre id="probe" hidden="">(.*?)</pre>', dom, re.DOTALL)
    said = json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")) if found else {}
    print(json.dumps(said, indent=1))
    wrong = [rule for rule, holds in rules(text, said).items() if not holds]
    print(f"{page}: {len(text.encode()):,} bytes; " + ("; ".join(wrong) or "the page works"))
    return 1 if wrong else 0


def rules(text: str, said: dict) -> dict[str, bool]:
    """What must hold of a page, and whether it does."""
    if not said:
        return {"its script did not run to its end": False}
    return {
        "larger than 2 MB": len(text.encode()) <= MOST_BYTES,
        f"errors: {said['errors']}": not said["errors"],
        "the chart can't be focused": said["focused"],
        "focus isn't seen": said["outline"] != "none",
        "it doesn't start at the peak": said["start"] == said["peak"],
        "Home, arrows, Page or End don't move": (said["home"], said["right"], said["page"]) == (0, 1, 0)
        and said["end"] == said["last"] == said["beyond"],
        "the moment isn't told": "alive" in said["text"],
        "nothing is drawn": said["areas"] > 0 and said["rows"] > 0 and said["alive"] > 0,
        "no value is told under the pointer": bool(said["tip"]),
    }


def run(browser: str, scratch: Path, page: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Chromium, once."""
    fixed = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1")
    profile = f"--user-data-dir={scratch / 'profile'}"
    command = [browser, *fixed, profile, "--virtual-time-budget=3000", *flags, page.absolute().as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


if __name__ == "__main__":
    sys.exit(exit_code(main, PROGRAM))
