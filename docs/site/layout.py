"""Looks at the built site in Chromium: is anything cut, and does a page fit a phone?

    make docs && python docs/site/layout.py

Prints what does not hold. Exit code 1 if there is anything, 2 without a browser or a site.

At 1,280 px no block of code may be wider than its place, and at each width no page wider than the
window: tables and Python code may scroll within it on a phone.
"""

import html
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SITE = Path(__file__).parents[2] / "build" / "site"
WIDTHS = (1280, 390)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
PAGE = """<!doctype html>
<body>
{frames}
<script>
addEventListener("load", () => {{
  const faults = [];
  for (const frame of document.querySelectorAll("iframe")) {{
    const page = frame.contentDocument;
    const say = (text) => faults.push(`${{frame.title}} at ${{frame.width}} px: ${{text}}`);
    const root = page.documentElement;
    if (root.scrollWidth > root.clientWidth) say(`${{root.scrollWidth}} px wide`);
    if (frame.width < 1280) continue;
    for (const code of page.querySelectorAll("pre, pre > code"))
      if (code.scrollWidth > code.clientWidth + 1) say(`cut: ${{code.innerText.slice(0, 60)}}`);
  }}
  document.body.textContent = JSON.stringify(faults);
}});
</script>
"""


def main() -> int:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    pages = sorted(SITE.rglob("*.html"))
    if not browser or not pages:
        print(f"no {' or '.join(BROWSERS)}" if pages else f"no pages in {SITE}: make docs")
        return 2
    frames = []
    for page in pages:
        for width in WIDTHS:
            place = f'src="{page.as_uri()}" title="{page.name}" width="{width}" height="800"'
            frames.append(f"<iframe {place}></iframe>")
    with tempfile.TemporaryDirectory() as folder:
        driver = Path(folder, "pages.html")
        driver.write_text(PAGE.format(frames="\n".join(frames)), encoding="utf-8")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
        command = [browser, *flags, f"--user-data-dir={folder}/profile", "--dump-dom"]
        answer = subprocess.run([*command, driver.as_uri()], capture_output=True, text=True)
    found = re.search(r"<body>(\[.*\])\s*</body>", answer.stdout, re.DOTALL)
    if not found:
        print(f"{browser} did not show the pages: {answer.stderr[-300:]}")
        return 2
    faults = json.loads(html.unescape(found[1]))
    print(
        "\n".join(faults)
        or f"{len(pages)} pages, {' and '.join(map(str, WIDTHS))} px: nothing is cut"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
