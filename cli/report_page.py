"""The page of `fusekit report`: a table that sorts and searches, and a panel for one kernel.

The table is HTML; what the panel shows is JSON, of which the script makes text nodes only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from fusekit_cli import output
from fusekit_cli.terminal import inline

_STYLE = """
.tools{display:flex;flex-wrap:wrap;gap:.5rem .9rem;align-items:center;margin:0 0 .7rem}
.tools input[type=search]{flex:1 1 16rem;max-width:30rem;font:inherit;padding:.42rem .75rem;color:inherit;
background:var(--raised);border:1px solid var(--line);border-radius:8px}
.chips{display:flex;flex-wrap:wrap;gap:.35rem;margin:0 0 .9rem}
button{font:inherit;color:inherit;background:none;border:0;padding:0;cursor:pointer}
.chips button{font-size:13px;padding:.16rem .65rem;border:1px solid var(--line);border-radius:99px;
background:var(--raised)}
.chips button[aria-pressed=true]{background:var(--mark);border-color:var(--accent);color:var(--accent)}
.chips small{color:var(--quiet);margin-left:.35em}
#kernels,#kernels thead,#kernels tbody{display:block}
#kernels thead{position:sticky;top:0;background:var(--ground);z-index:1}
#kernels tr{display:grid;border-bottom:1px solid var(--line)}
#kernels tbody tr{content-visibility:auto;contain-intrinsic-size:auto 2.1rem}
#kernels th,#kernels td{border:0;padding-inline:.5rem}#kernels td{overflow:hidden;text-overflow:ellipsis}
#kernels th button{font-weight:600;color:var(--quiet)}
#kernels th[aria-sort] button{color:var(--accent)}
th[aria-sort=ascending] button::after{content:" \\2191"}th[aria-sort=descending] button::after{content:" \\2193"}
#kernels tbody tr:not(.group):hover{background:var(--raised)}
#kernels td{cursor:pointer}
#kernels .group{display:block;contain-intrinsic-size:auto 3rem}
.group th{display:block;padding-top:1.1rem;color:var(--text);font-size:14px}
.group small{font-weight:400;color:var(--quiet);margin-left:.6em}
.name{font-weight:600}.name small{font-weight:400;color:var(--quiet);font-size:inherit}
.meter{display:inline-block;vertical-align:middle;margin-right:.5em}
dialog{width:min(62rem,100vw);max-width:100vw;height:100dvh;max-height:100dvh;margin:0 0 0 auto;padding:0;border:0;
border-left:1px solid var(--line);background:var(--ground);color:var(--text);overflow:auto}
dialog::backdrop{background:rgb(0 0 0/.4)}
dialog header{position:sticky;top:0;display:flex;gap:1rem;justify-content:space-between;align-items:start;
background:var(--ground);border-bottom:1px solid var(--line);padding:1rem 1.3rem .8rem}
dialog h2{margin:0;overflow-wrap:anywhere}
dialog header button{font-size:1.4rem;line-height:1;padding:.15rem .55rem;border-radius:6px}
dialog header button:hover{background:var(--raised)}
dialog main{padding:.2rem 1.3rem 3rem}
dialog pre{margin:0;padding:.7rem .9rem;background:var(--raised);border:1px solid var(--line);border-radius:8px;
overflow:auto}
dialog summary{font-weight:600;font-size:.95rem;margin:1.3rem 0 .4rem;cursor:pointer}
dialog td:last-child{white-space:normal;min-width:14rem}
@media (max-width:1260px){#kernels thead{position:static}
#kernels tr{display:flex;flex-wrap:wrap;gap:.1rem .9rem;padding:.5rem .1rem}
#kernels tbody tr:not(.group){contain-intrinsic-size:auto 6.5rem}
#kernels th,#kernels td{padding:0;text-align:left}.group th{padding-top:.7rem}
#kernels td:first-child{flex-basis:100%;white-space:normal;overflow-wrap:anywhere}
#kernels td[data-label]:not(:empty)::before{content:attr(data-label) " ";color:var(--quiet)}
#kernels td:empty{display:none}}
@media print{.tools,.chips,dialog{display:none}#kernels thead{position:static}}
"""

_SCRIPT = """
"use strict";
const find = selector => document.querySelector(selector);
const kernels = JSON.parse(find("#data").textContent);
const body = find("#kernels tbody"), search = find("#search"), grouped = find("#grouped"), panel = find("dialog");
const heads = [...document.querySelectorAll("#kernels thead th")];
const groups = [...body.querySelectorAll(".group")];
const rows = [...body.querySelectorAll("tr:not(.group)")];
const chips = [...document.querySelectorAll(".chips button")];
const texts = kernels.map(kernel => kernel.search);
const value = cell => cell.dataset.value ?? cell.textContent;
const values = heads.map((_, column) => rows.map(row => value(row.cells[column])));
const collator = new Intl.Collator("en", {numeric: true});
let column = 0, sign = 1, model = "";

function compare(a, b) {
  const x = values[column][a], y = values[column][b];
  if ((x === "") !== (y === "")) return x === "" ? 1 : -1;
  const order = heads[column].classList.contains("n") ? x - y : collator.compare(x, y);
  return sign * order || a - b;
}
function show() {
  const words = search.value.toLowerCase().split(/\\s+/).filter(Boolean);
  const order = rows.map((_, i) => i).filter(i =>
    (!model || rows[i].dataset.model === model) && words.every(word => texts[i].includes(word))).sort(compare);
  const shown = order.map(i => rows[i]);
  if (grouped.checked) {
    body.replaceChildren(...groups.flatMap(group => {
      const members = shown.filter(row => row.dataset.model === group.dataset.model);
      return members.length ? [group, ...members] : [];
    }));
  } else body.replaceChildren(...shown);
  find("#count").textContent = shown.length === rows.length ? "" : shown.length + " of " + rows.length;
}
function make(tag, text, parent) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}
async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
}
function section(main, [title, content]) {
  const heading = make("h3", title, main);
  if (typeof content === "string") make("pre", content, main);
  else if (content.deflated) {
    heading.remove();
    const details = make("details", undefined, main);
    make("summary", title, details);
    const code = make("pre", "", details);
    const read = async () => { code.textContent = await inflate(content.deflated); };
    details.addEventListener("toggle", read, {once: true});
  } else {
    const wrap = make("div", undefined, main);
    wrap.className = "wrap";
    const table = make("table", undefined, wrap);
    content.forEach((cells, i) => {
      const row = make("tr", undefined, table);
      cells.forEach(cell => make(i ? "td" : "th", cell, row));
    });
  }
}
function route() {
  const link = rows.map(row => row.querySelector("a")).find(a => a.hash === location.hash && a.hash !== "");
  if (!link) { panel.close(); return; }
  const kernel = kernels[link.closest("tr").dataset.index];
  find("dialog h2").textContent = kernel.name;
  find("dialog p").textContent = kernel.about;
  const main = find("dialog main");
  main.replaceChildren();
  kernel.sections.forEach(content => section(main, content));
  if (!panel.open) panel.showModal();
  panel.scrollTop = 0;
}
heads.forEach((head, index) => head.firstElementChild.addEventListener("click", () => {
  sign = column === index ? -sign : head.classList.contains("n") ? -1 : 1;
  column = index;
  heads.forEach(other => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  show();
}));
chips.forEach(chip => chip.addEventListener("click", () => {
  model = chip.dataset.model;
  chips.forEach(other => other.setAttribute("aria-pressed", other === chip));
  show();
}));
search.addEventListener("input", show);
grouped.addEventListener("change", show);
body.addEventListener("click", event => {
  const row = event.target.closest("tr:not(.group)");
  if (row && !event.target.closest("a") && !String(getSelection())) location.hash = row.querySelector("a").hash;
});
panel.addEventListener("click", event => { if (event.target === panel) panel.close(); });
panel.addEventListener("close", () => { if (location.hash.length > 1) location.hash = "list"; });
find("dialog button").addEventListener("click", () => panel.close());
addEventListener("hashchange", route);
document.querySelectorAll(".scripted").forEach(element => { element.hidden = false; });
route();
"""

_METER = 44  # pixels
# Heading, key of a kernel's cells, whether it is a number, width.
_COLUMNS = (
    ("Kernel", "name", False, "minmax(13rem,2.2fr)"),
    ("Operation", "op", False, "minmax(7.4rem,1fr)"),
    ("Arch", "arch", False, "5rem"),
    ("Registers", "registers", True, "5.2rem"),
    ("Spills", "spills", True, "3.9rem"),
    ("Shared", "shared", True, "5.4rem"),
    ("Threads", "threads", True, "4.6rem"),
    ("Occupancy", "occupancy", True, "6.9rem"),
    ("Proved", "proved", True, "4.3rem"),
    ("Ran on", "ran", False, "minmax(4.6rem,.6fr)"),
    ("Cubin", "cubin", True, "5.2rem"),
    ("Signed by", "signed", False, "minmax(5.5rem,1.2fr)"),
)


def html(where: str, kernels: Sequence[Mapping[str, Any]], figures: dict[str, str], notes: Sequence[str]) -> str:
    """The page. where: what it is of. kernels: see `fusekit_cli.report`, sorted by name. figures: label -> figure.
    notes: sentences below the table.
    """
    from fusekit.bench.page import page, tiles

    models: dict[str, list[Mapping[str, Any]]] = {}
    for kernel in kernels:
        models.setdefault(kernel["model"], []).append(kernel)
    shown = [row for row in _COLUMNS if row[1] in ("name", "registers") or _differs(row[1], kernels)]
    widths = " ".join(width for *_, width in shown)
    numbered = iter(range(len(kernels)))
    body = "".join(
        _group(model, members, len(shown)) + "".join(_row(next(numbered), kernel, shown) for kernel in members)
        for model, members in models.items()
    )
    head = "".join(
        f"<th{' class=n' if number else ''}{' aria-sort=ascending' if key == 'name' else ''}>"
        f"<button type=button>{heading}</button></th>"
        for heading, key, number, _ in shown
    )
    below = "".join(f'<p class="note">{_text(note)}</p>' for note in notes)
    content = (
        f'<p class="quiet">fusekit report</p><h1>{_text(where)}</h1>\n{tiles(figures)}\n'
        '<div class="tools scripted" hidden><input id="search" type="search" aria-label="Search" '
        'placeholder="Search names, operations, dtypes, keys, signers">'
        '<label><input id="grouped" type="checkbox" checked> by model</label><span id="count" class="quiet"></span>'
        "</div>\n"
        f'<div class="chips scripted" hidden>{_chips(models)}</div>\n'
        f'<table id="kernels"><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>\n'
        f"<footer>{below}</footer>\n"
        '<dialog aria-labelledby="kernel"><header><div><h2 id="kernel"></h2><p class="quiet"></p></div>'
        '<button type="button" aria-label="Close">\u00d7</button></header><main></main></dialog>'
    )
    data = [{name: kernel[name] for name in ("name", "about", "search", "sections")} for kernel in kernels]
    return page(
        f"{where}: fusekit report",
        content,
        style=_STYLE + f"#kernels tr{{grid-template-columns:{widths}}}",
        script=_SCRIPT,
        data=data,
    )


def _differs(key: str, kernels: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the column `key` has something to show; architectures only if there are several."""
    values = {kernel[key] for kernel in kernels}
    return len(values) > 1 if key == "arch" else bool(values - {None, ""})


def _chips(models: Mapping[str, Sequence[object]]) -> str:
    counts = {"": sum(map(len, models.values()))} | {model: len(members) for model, members in models.items()}
    return "".join(
        f'<button type="button" data-model="{_text(model)}" aria-pressed="{"false" if model else "true"}">'
        f"{_text(model) or 'all'}<small>{count}</small></button>"
        for model, count in counts.items()
    )


def _group(model: str, members: Sequence[Mapping[str, Any]], columns: int) -> str:
    about = f"{output.plural(len(members), 'kernel')}, {output.size(sum(kernel['cubin'] for kernel in members))}"
    head = f'<th colspan="{columns}">{_text(model)}<small>{about}</small></th>'
    return f'<tr class="group" data-model="{_text(model)}">{head}</tr>\n'


def _row(index: int, kernel: Mapping[str, Any], columns: Sequence[tuple[str, str, bool, str]]) -> str:
    cells = []
    for heading, key, number, _ in columns:
        value = kernel[key]
        label = "" if key in ("name", "op") else f' data-label="{heading}"'
        if number:
            value = "" if value is None else value
            cells.append(f'<td class="n"{label} data-value="{value}">{_number(key, value)}</td>')
        else:
            cells.append(f"<td{label}>{_name(kernel) if key == 'name' else _text(value or '')}</td>")
    return f'<tr data-index="{index}" data-model="{_text(kernel["model"])}">' + "".join(cells) + "</tr>\n"


def _name(kernel: Mapping[str, Any]) -> str:
    name, at, variant = kernel["name"].partition("/")[2].partition("@")
    link = quote(f"{kernel['name']}.{kernel['arch']}", safe="/@")
    return f'<a class="name" href="#{link}">{_text(name)}<small>{at}{_text(variant)}</small></a>'


def _number(key: str, value: Any) -> str:
    if value == "":
        return ""
    if key in ("cubin", "shared"):
        return f"{value / 1024:.1f} KiB" if value else "0"
    if key == "occupancy":
        bars = "".join(
            f'<rect class="{kind}" width="{width:.1f}" height="8" rx="4"/>'
            for kind, width in (("track", _METER), ("bar", _METER * value))
        )
        return f'<svg class="meter" width="{_METER}" height="8" aria-hidden="true">{bars}</svg>{value:.0%}'
    return f"{value:,}"


def _text(value: object) -> str:
    """`value` for HTML, in a text or between double quotes; control characters and marks of direction as escapes."""
    return escape(inline(str(value)))
