"""The style sheet of records.report: light and dark, as the reader's system has it."""

STYLE = """\
:root { --ink: #1d2530; --soft: #5c6875; --line: #dfe4ea; --page: #f6f8fa; --card: #fff;
  --train: #2f6fde; --eval: #e0891d; --test: #8a5cd6; --before: #a9b2bd;
  --pass: #1d8a4e; --warn: #b26a00; --fail: #c62f2f; --unknown: #6b7683; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaf0; --soft: #9aa6b4; --line: #2d3642; --page: #12161c; --card: #1a2029;
    --train: #6a9bf4; --eval: #f0a94a; --test: #b392f0; --before: #67727f;
    --pass: #4cc083; --warn: #f0ad4e; --fail: #f47070; --unknown: #9aa6b4; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 14px/1.5 system-ui, sans-serif; }
header, main { max-width: 1280px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 28px; }
h1 { font-size: 24px; margin: 0 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 32px 0 8px; }
h3 { font-size: 14px; margin: 0 0 10px; overflow-wrap: anywhere; }
small { color: var(--soft); font-weight: normal; }
code { font: 600 13px ui-monospace, monospace; }
p { margin: 0 0 10px; color: var(--soft); }
ul.facts, ul.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 6px 22px;
  margin: 0; padding: 0; color: var(--soft); }
ul.facts b { color: var(--ink); font-size: 17px; font-variant-numeric: tabular-nums; }
ul.legend { margin-bottom: 12px; }
ul.legend i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
i.train { background: var(--train); } i.eval { background: var(--eval); }
i.test { background: var(--test); } i.before { background: var(--before); }
.train { fill: var(--train); } .eval { fill: var(--eval); } .test { fill: var(--test); }
.before { fill: var(--before); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 14px; align-items: start; }
article { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 14px 16px; min-width: 0; }
article.fail { border-color: var(--fail); } article.warn { border-color: var(--warn); }
svg { display: block; width: 100%; height: auto; margin-bottom: 8px; }
svg text { font-size: 9px; fill: var(--soft); font-variant-numeric: tabular-nums; }
svg text.value { fill: var(--ink); }
svg .end { text-anchor: end; }
svg .axis { stroke: var(--line); fill: none; }
svg .tip { fill: transparent; } svg .tip:hover { fill: var(--ink); opacity: .07; }
.wide { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 4px 12px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th { text-align: left; font-weight: 500; color: var(--soft); }
th, td { padding: 3px 10px 3px 0; vertical-align: top; }
.wide td:last-child { min-width: 180px; }
.wide td { overflow-wrap: break-word; max-width: 560px; }
.wide tr + tr td { border-top: 1px solid var(--line); }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.badge { display: inline-block; border: 1px solid currentColor; border-radius: 9px; padding: 0 8px;
  white-space: nowrap; font: 600 11px/17px system-ui, sans-serif; }
h3 .badge { margin-left: 6px; }
.badge.pass { color: var(--pass); } .badge.warn { color: var(--warn); }
.badge.fail { color: var(--fail); } .badge.unknown { color: var(--unknown); }
.note { font-size: 13px; }
main { padding-bottom: 48px; }
"""
