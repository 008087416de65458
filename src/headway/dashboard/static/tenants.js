// Tenants: what each used in the last ten minutes, and what its quotas leave.

import { html, useState } from "./vendor/preact.module.js";
import { causeName, number, percent, seconds, tenantName } from "./format.js";
import { API, Failure, Table, usePolled } from "./parts.js";

function mainCause(counts) {
  const waits = Object.entries(counts).filter(([name]) => name.startsWith("wait:"));
  const most = waits.sort((a, b) => b[1] - a[1])[0];
  return most ? `${causeName(most[0].slice(5))} (${percent(most[1] / counts.wait_s)})` : "–";
}

function quotaText(row) {
  const parts = Object.entries(row.quotas ?? {}).map(([name, [left, all]]) => `${number(left)} of ${number(all)} ${name.split("_")[0]}/min`);
  if (row.concurrent_requests) parts.push(`${number(row.num_in_flight)} of ${number(row.concurrent_requests)} at a time`);
  return parts.join(", ") || "none";
}

const COLUMNS = [
  ["tenant", (row) => html`${row.isOthers ? html`<i>all others</i>` : tenantName(row.tenant)}${row.is_disabled ? " (disabled)" : ""}`],
  ["tier", (row) => row.tier ?? "–"],
  ["weight", (row) => number(row.weight, 1), "n"],
  ["running", (row) => number(row.num_running), "n"],
  ["waiting", (row) => number(row.num_waiting), "n"],
  ["arrived", (row) => number(row.counts.arrived ?? 0), "n"],
  ["ended", (row) => number(row.counts.finished ?? 0), "n"],
  ["prompt tokens", (row) => number(row.counts.prompt_tokens ?? 0), "n"],
  ["cached", (row) => (row.counts.prompt_tokens ? percent(row.counts.cached_tokens / row.counts.prompt_tokens) : "–"), "n"],
  ["output tokens", (row) => number(row.counts.output_tokens ?? 0), "n"],
  ["mean TTFT", (row) => seconds(row.counts.first_tokens ? row.counts.ttft_s / row.counts.first_tokens : null), "n"],
  ["waited", (row) => seconds(row.counts.wait_s ?? 0), "n"],
  ["mostly for", (row) => mainCause(row.counts)],
  ["preempted", (row) => number(row.counts.preempted ?? 0), "n"],
  ["targets met", (row) => {
    const judged = (row.counts.met ?? 0) + (row.counts.missed ?? 0);
    return judged ? percent((row.counts.met ?? 0) / judged) : "–";
  }, "n"],
  ["quota left", quotaText],
  ["cost", (row) => (row.counts.cost ? number(row.counts.cost, 6) : "–"), "n"],
];

export function Tenants() {
  const [search, setSearch] = useState("");
  const [data, error] = usePolled(`${API}/tenants${search ? `?search=${encodeURIComponent(search)}` : ""}`);
  const rows = (data?.tenants ?? []).sort((a, b) => (b.counts.output_tokens ?? 0) - (a.counts.output_tokens ?? 0) || (a.tenant < b.tenant ? -1 : 1));
  const others = data?.others ? [{ isOthers: true, tenant: "", counts: data.others }] : [];
  return html`<section class="card" aria-label="Tenants">
    <div class="head"><h1 class="brand">Tenants</h1><span class="muted">the busiest of the last ten minutes; tokens and costs of requests that ended</span></div>
    <form class="form" onSubmit=${(event) => event.preventDefault()}>
      <label for="tenant-search">Name contains</label>
      <input id="tenant-search" type="search" maxlength="100" value=${search} onInput=${(event) => setSearch(event.target.value)} />
    </form>
    <${Failure} error=${error} />
    ${data && html`<${Table} caption="Tenants" columns=${COLUMNS} rows=${[...rows, ...others]} keyOf=${(row) => (row.isOthers ? "others" : `t${row.tenant}`)}
      empty=${search ? "No tenant has such a name." : "No requests in the last ten minutes."} />`}
  </section>`;
}
