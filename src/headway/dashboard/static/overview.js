// The first page: why requests wait, and what the engines do.

import { html, useMemo } from "./vendor/preact.module.js";
import { Chart } from "./chart.js";
import { OPEN_WAIT, causeColor, causeName, clock, number, percent, seconds, sum, tenantName } from "./format.js";
import { RequestLink, Table } from "./parts.js";

const OBJECTIVE = 0.99;
const whole = (value) => number(value);

function Tiles({ now, history }) {
  const met = sum(history.num_met);
  const judged = met + sum(history.num_missed);
  const share = judged ? met / judged : null;
  const burn = share === null ? null : (1 - share) / (1 - OBJECTIVE);
  const tiles = [
    ["Running", whole(now.num_running)],
    ["Waiting", whole(now.num_waiting)],
    ["Output tokens/s", whole(now.tokens_per_s)],
    ["Last step", seconds(now.step_s)],
    ["KV blocks in use", percent(now.num_blocks ? now.num_blocks_used / now.num_blocks : null)],
    ["Goodput", percent(share, 1), judged ? `of ${whole(judged)}` : "no targets"],
    ["Burn rate", number(burn, 1), `objective ${percent(OBJECTIVE)}`],
    ["Refused", whole(sum(history.refusals.map(([, values]) => sum(values)))), "in 10 min"],
    ["Preempted", whole(sum(history.preemptions.map(([, values]) => sum(values)))), "in 10 min"],
    ["Restarts", whole(sum(history.num_restarts)), "in 10 min"],
  ];
  return html`<dl class="tiles">
    ${tiles.map(([name, value, note]) => html`<div class="card tile" key=${name}>
      <dt>${name}</dt><dd>${value} ${note && html`<small>${note}</small>`}</dd>
    </div>`)}
  </dl>`;
}

function Waiting({ history, times, from }) {
  const totals = history.causes.map(([cause, values]) => [cause, sum(values)]).sort((a, b) => b[1] - a[1]);
  const open_s = sum(history.open_waits);
  const all_s = sum(totals.map(([, total]) => total)) + open_s;
  const perInterval = (values) => values.map((value, i) => value / (i === values.length - 1 ? history.last_s : history.interval_s));
  const columns = new Map(history.causes);
  const series = totals
    .filter(([, total]) => total > 0)
    .map(([cause]) => ({ name: causeName(cause), color: causeColor(cause), values: perInterval(columns.get(cause)) }));
  if (open_s > 0) series.push({ name: OPEN_WAIT, color: 11, values: perInterval(history.open_waits) });
  const rows = [...totals.map(([cause, total]) => [causeName(cause), total]), [OPEN_WAIT, open_s]].filter(([, total]) => total > 0);
  return html`<${Chart} title="Requests waiting, by cause" isWide isStacked isQuiet times=${times} from=${from} series=${series}
    hint="The height is the number of requests that wait; the area of a cause is its waiting time. A wait is known by cause when it ends.">
    ${rows.length > 0 && html`<table class="sums">
      <caption>Waiting time of the last ten minutes</caption>
      <thead><tr><th scope="col">waited for</th><th scope="col" class="n">time</th><th scope="col" class="n">share</th></tr></thead>
      <tbody>
        ${rows.map(([name, total]) => html`<tr key=${name}>
          <th scope="row">${name}</th><td class="n">${seconds(total)}</td><td class="n">${percent(total / all_s, 1)}</td>
        </tr>`)}
        <tr class="sum"><th scope="row">all waits</th><td class="n">${seconds(all_s)}</td><td class="n">${percent(1)}</td></tr>
      </tbody>
    </table>`}
  </${Chart}>`;
}

function byTenant(loads, kind) {
  const series = loads.tenants.map((name, i) => ({ name: tenantName(name), color: i, values: loads[kind][i] }));
  const others = loads[`other_${kind}`];
  if (sum(others)) series.push({ name: "all others", color: 11, values: others });
  return series.filter((one) => sum(one.values) > 0);
}

function StepTime({ history, times, from }) {
  const { predicted_ms: predicted, model_error: error } = history;
  const edge = (sign) => predicted.map((value, i) => (value === null || error[i] === null ? null : Math.max(0, value * (1 + sign * error[i]))));
  const series = [
    { name: "upper", isBand: true, color: 10, values: edge(1) },
    { name: "lower", isBand: true, color: 10, values: edge(-1) },
    { name: "mean", color: 0, values: history.step_ms, isScale: true },
    { name: "slowest", color: 6, values: history.max_step_ms, isScale: true, dash: [2, 3] },
    { name: "predicted", color: 10, values: predicted, dash: [6, 3] },
  ];
  const has = history.step_ms.some((value) => value !== null);
  return html`<${Chart} title="Step time, ms" times=${times} from=${from} series=${has ? series : []} band=${[1, 2]}
    hint="Against the step-time model and its median error (grey)." />`;
}

function Blocks({ history, times, from }) {
  const { blocks } = history;
  const series = blocks.tenants.map((name, i) => ({ name: tenantName(name), color: i, values: blocks.owned[i] }));
  const named = blocks.used.map((used, t) => used - blocks.kept[t] - sum(blocks.owned.map((column) => column[t])));
  const rest = named.map((value) => Math.max(0, value));
  if (sum(rest)) series.push({ name: "other requests", color: 9, values: rest });
  if (sum(blocks.kept)) series.push({ name: "kept of preempted", color: 8, values: blocks.kept });
  if (sum(blocks.cached)) series.push({ name: "cached prefixes", color: 11, values: blocks.cached });
  return html`<${Chart} title="KV blocks, by owner" isStacked times=${times} from=${from} series=${series} top=${blocks.total} format=${whole}
    hint=${`Of ${whole(blocks.total)} blocks. Cached prefixes are free for whoever needs them.`} />`;
}

function counts(pairs, nameOf = (name) => name) {
  return pairs.map(([name, values], i) => ({ name: nameOf(name), color: i, values }));
}

function Preemptions({ history, times, from }) {
  const columns = [
    ["time", (one) => clock(one.at)],
    ["request", (one) => html`<${RequestLink} id=${one.id} />`],
    ["tenant", (one) => (one.tenant === null ? "–" : tenantName(one.tenant))],
    ["for", (one) => (one.by_tenant === null ? "–" : tenantName(one.by_tenant))],
    ["needed", (one) => causeName(one.cause)],
    ["method", (one) => one.method],
    ["tokens lost", (one) => whole(one.num_tokens_lost), "n"],
  ];
  return html`<${Chart} title="Preemptions, by cause" isStacked times=${times} from=${from} format=${whole}
    series=${counts(history.preemptions, causeName)} >
    ${history.last_preemptions.length > 0 &&
    html`<${Table} caption="The last preemptions" columns=${columns} rows=${history.last_preemptions.slice(0, 8)} />`}
  </${Chart}>`;
}

function Charts({ history }) {
  const times = history.open_waits.map((_, i) => history.start + (i + 1) * history.interval_s);
  const from = times[Math.min(history.num_empty, times.length - 1)];
  const judged = sum(history.num_met) + sum(history.num_missed);
  const restarts = [
    ["time", (one) => clock(one.at)],
    ["reason", (one) => one.reason],
    ["requests sent again", (one) => whole(one.num_resubmitted), "n"],
  ];
  return html`<div class="grid">
      <${Waiting} history=${history} times=${times} from=${from} />
      <${Chart} title="Running, by tenant" isStacked times=${times} from=${from} series=${byTenant(history.loads, "running")} format=${whole} />
      <${Chart} title="Waiting, by tenant" isStacked times=${times} from=${from} series=${byTenant(history.loads, "waiting")} format=${whole} />
      <${StepTime} history=${history} times=${times} from=${from} />
      <${Blocks} history=${history} times=${times} from=${from} />
      <${Chart} title="Output tokens per second" times=${times} from=${from}
        series=${sum(history.tokens_per_s) ? [{ name: "output tokens/s", color: 2, values: history.tokens_per_s }] : []} />
      <${Chart} title="Time to the first token, ms" times=${times} from=${from}
        series=${history.ttft_ms.some((value) => value !== null) ? [{ name: "mean", color: 4, values: history.ttft_ms }] : []} />
      <${Chart} title="Requests with targets" isStacked times=${times} from=${from} format=${whole}
        hint="Finished requests that met or missed their targets."
        series=${judged ? [
          { name: "met", color: 2, values: history.num_met },
          { name: "missed", color: 6, values: history.num_missed },
        ] : []} />
      <${Chart} title="Refusals, by reason" isStacked times=${times} from=${from} format=${whole} series=${counts(history.refusals)} />
      <${Preemptions} history=${history} times=${times} from=${from} />
      <section class="card" aria-label="Engine restarts">
        <div class="head"><h2>Engine restarts</h2></div>
        <${Table} caption="The last restarts" columns=${restarts} rows=${history.last_restarts} empty="None since the server started." />
      </section>
    </div>`;
}

export function Overview({ now, history }) {
  // The charts change with the history only, the tiles twice a second.
  const charts = useMemo(() => history && html`<${Charts} history=${history} />`, [history]);
  if (!now || !history) return html`<p class="empty">Waiting for the first data.</p>`;
  return html`<h1 class="visually-hidden">Overview</h1><${Tiles} now=${now} history=${history} />${charts}`;
}
