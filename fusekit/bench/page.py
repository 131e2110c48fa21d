"""Pages of HTML in one file, with one look: they load nothing, and run no more than the script that they are given.

A content security policy names the style and the script by their digests, so a browser runs nothing else: no text that
got into a page from a name or a spec.
"""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from typing import Any

_STYLE = """
:root{color-scheme:light dark;--ground:#fff;--raised:#f5f7f6;--line:#dfe4e1;--text:#18211c;--quiet:#5d6b63;
--accent:#14743b;--bar:#1b8a48;--track:#e3e8e5;--bad:#b3261e;--mark:#e6f4ea}
@media (prefers-color-scheme:dark){:root{--ground:#101513;--raised:#19201d;--line:#2d3732;--text:#e4ebe7;
--quiet:#98a69f;--accent:#63d28d;--bar:#3fae6c;--track:#2a332f;--bad:#ff8a80;--mark:#1b3325}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;margin:0 auto;max-width:96rem;
padding:1.6rem clamp(.9rem,3vw,2.5rem) 3rem;background:var(--ground);color:var(--text)}
h1{font-size:1.55rem;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2.2rem 0 .6rem}h3{font-size:.95rem;margin:1.3rem 0 .4rem}
p{margin:.4rem 0}.quiet,.note{color:var(--quiet)}.note{font-size:13px;max-width:75ch}.bad{color:var(--bad)}
code,pre,.mono{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(8.4rem,1fr));gap:.6rem;
margin:1.1rem 0 1.3rem;padding:0;list-style:none}
.tiles li{background:var(--raised);border:1px solid var(--line);border-radius:10px;padding:.5rem .95rem}
.tiles b{display:block;font-size:1.3rem;line-height:1.35;font-variant-numeric:tabular-nums;white-space:nowrap}
.tiles span{font-size:12.5px;color:var(--quiet)}
table{border-collapse:collapse;font-size:13px}
th,td{padding:.34rem .7rem;text-align:left;white-space:nowrap;border-bottom:1px solid var(--line)}
th{font-weight:600;color:var(--quiet)}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
.wrap{overflow-x:auto}footer{margin-top:1.4rem}
a{color:var(--accent);text-decoration:none}a:hover{text-decoration:underline}
:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
svg{display:block;max-width:100%}svg text{fill:var(--text);font:12px system-ui,sans-serif}
svg .quiet{fill:var(--quiet)}svg .track{fill:var(--track)}svg .bar{fill:var(--bar)}
"""


def page(title: str, body: str, *, style: str = "", script: str = "", data: Any = None) -> str:
    """A whole page. body: HTML, whose texts are escaped. style: more rules. script: the only one that runs. data: JSON
    types, which the script reads from the element `#data`.
    """
    style = _STYLE + style
    sources = {"style-src": style} | ({"script-src": script} if script else {})
    policy = "; ".join(
        ["default-src 'none'", *(f"{kind} '{_digest(text)}'" for kind, text in sources.items()), "base-uri 'none'"]
    )
    rest = ""
    if data is not None:  # "<" would end the element, or begin a comment in it
        text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
        rest += f'<script type="application/json" id="data">{text}</script>\n'
    if script:
        rest += f"<script>{script}</script>\n"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style></head>\n<body>\n{body}\n{rest}</body></html>\n"
    )


def tiles(values: dict[str, str]) -> str:
    """A row of figures. values: label -> figure."""
    items = "".join(f"<li><b>{escape(value)}</b><span>{escape(label)}</span></li>" for label, value in values.items())
    return f'<ul class="tiles">{items}</ul>'


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
