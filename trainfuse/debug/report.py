"""One self-contained HTML page about a step: no scripts, no fonts, nothing fetched."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from autodiff.graph import PHASES

if TYPE_CHECKING:
    from trainfuse.debug.explain import Explanation

_TEMPLATE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>trainfuse: {{ e.capture|words }}</title>
<style>
  :root { color-scheme: light dark; --line: #8884; --dim: #777;
          --forward: #2a9d5c; --backward: #b0479d; --update: #1f8fb3; }
  body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto;
         padding: 0 1rem; }
  h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
  table { border-collapse: collapse; width: 100% }
  th, td { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line);
           vertical-align: top }
  th { color: var(--dim); font-weight: normal }
  .n { text-align: right; font-variant-numeric: tabular-nums }
  code, td.c { font-family: ui-monospace, monospace; font-size: .9em }
  .forward { color: var(--forward) } .backward { color: var(--backward) }
  .update { color: var(--update) } .dim { color: var(--dim) }
  dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem }
  dt { color: var(--dim) } dd { margin: 0 }
  summary { cursor: pointer }
</style>
</head>
<body>
<h1>trainfuse: {{ e.capture|words }}</h1>
<dl>
  {% if e.capture_reason %}<dt>why</dt><dd>{{ e.capture_reason }}</dd>{% endif %}
  <dt>graphs</dt><dd>{{ e.graph_count }}, breaks: {{ e.graph_break_count }}</dd>
  {% for reason in e.break_reasons %}<dt>break</dt><dd>{{ reason }}</dd>{% endfor %}
  <dt>backend</dt><dd>{{ e.backend }}</dd>
  <dt>CUDA graph</dt><dd>{{ e.cuda_graph }}</dd>
  {% for name, value in stats.items() %}<dt>{{ name|words }}</dt><dd>{{ value }}</dd>{% endfor %}
</dl>
<h2>Phases</h2>
<table>
<tr><th>phase<th class="n">groups<th class="n">nodes fused<th class="n">nodes left ATen
    <th class="n">bytes moved by groups</tr>
{% for phase in phases %}
<tr><td class="{{ phase.name }}">{{ phase.name }}
    <td class="n">{{ phase.groups }}<td class="n">{{ phase.fused }}
    <td class="n">{{ phase.aten }}<td class="n">{{ phase.bytes|bytes }}</tr>
{% endfor %}
</table>
<h2>Fused</h2>
<table>
<tr><th>group<th>schedule<th>nodes<th class="n">bytes<th>kernel</tr>
{% for g in e.groups %}
<tr><td class="{{ g.phase }}">{{ g.name }}<td>{{ g.schedule }}
    <td><details><summary>{{ g.nodes|ops }}</summary><table>
    {% for n in g.nodes %}
    <tr><td class="c">{{ n.name }}<td class="c">{{ n.op }}
        <td class="c dim">{{ n.where or "" }}</tr>
    {% endfor %}
    </table></details>
    <td class="n">{{ g.bytes|bytes }}<td class="c">{{ (g.kernel or "-")[:12] }}</tr>
{% endfor %}
</table>
<h2>Subgraphs</h2>
<table>
<tr><th>subgraph<th class="n">nodes<th>forward groups<th>backward groups
    <th class="n">saved<th class="n">recomputed nodes</tr>
{% for s in e.subgraphs %}
<tr><td>{{ s.name }}<td class="n">{{ s.nodes|length }}
    <td>{{ s.forward_groups|join(", ") }}<td>{{ s.backward_groups|join(", ") }}
    <td class="n">{{ s.saved_bytes|bytes }}<td class="n">{{ s.recomputed|length }}</tr>
{% endfor %}
</table>
<h2>Memory</h2>
{% if e.memory is not none %}<p>{{ e.memory|memory }}</p>{% endif %}
<table>
<tr><th>for the backward<th>operator<th>value<th class="n">times<th class="n">bytes
    <th>lines<th>why</tr>
{% for s in e.saved %}
<tr><td>{{ "kept" if s.kept else "computed again" }}<td class="c">{{ s.op }}
    <td class="c">{{ s.value }}<td class="n">{{ s.times }}<td class="n">{{ s.bytes|bytes }}
    <td class="c dim">{{ s.where|join(", ") }}<td>{{ s.why }}</tr>
{% endfor %}
</table>
<h2>Left as ATen calls</h2>
<table>
<tr><th>phase<th>node<th>operator<th>line</tr>
{% for n in e.aten_nodes %}
<tr><td class="{{ n.phase }}">{{ n.phase }}<td class="c">{{ n.name }}<td class="c">{{ n.op }}
    <td class="c dim">{{ n.where or "" }}</tr>
{% endfor %}
</table>
<h2>Why not</h2>
<table>
<tr><th>stage<th>reason<th>node<th>line</tr>
{% for r in e.refusals %}
<tr><td>{{ r.stage }}<td>{{ r.reason }}<td class="c">{{ r.node }}
    <td class="c dim">{{ r.where or "" }}</tr>
{% endfor %}
</table>
</body>
</html>
"""


def render(explanation: Explanation, stats: Mapping[str, Any] | None = None) -> str:
    """The page's text. stats: figures to show at the top, as `CompiledStep.stats()` gives them."""
    from trainfuse.debug.explain import human_bytes, memory_line, op_summary

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters.update(
        bytes=human_bytes,
        memory=memory_line,
        ops=op_summary,
        words=lambda text: text.replace("_", " "),
    )
    phases = [_phase_facts(explanation, phase) for phase in PHASES]
    template = environment.from_string(_TEMPLATE)
    return template.render(e=explanation, stats=stats or {}, phases=phases)


def _phase_facts(explanation: Explanation, phase: str) -> dict[str, Any]:
    groups = [group for group in explanation.groups if group.phase == phase]
    return {
        "name": phase,
        "groups": len(groups),
        "fused": sum(len(group.nodes) for group in groups),
        "aten": sum(node.phase == phase for node in explanation.aten_nodes),
        "bytes": sum(group.bytes for group in groups),
    }


def write(
    path: str | os.PathLike[str],
    explanation: Explanation,
    stats: Mapping[str, Any] | None = None,
) -> Path:
    """Write the page, making its folder; returns the path."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render(explanation, stats), encoding="utf-8")
    return target
