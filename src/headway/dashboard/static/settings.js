// Settings, and which differ from their defaults.

import { html, useState } from "./vendor/preact.module.js";
import { API, Failure, Table, usePolled } from "./parts.js";

const COLUMNS = [
  ["setting", (row) => html`<span class="mono">${row.name}</span>`],
  ["value", (row) => (row.differs ? html`<mark class="mono">${row.value || "none"}</mark>` : html`<span class="mono">${row.value || "–"}</span>`)],
  ["default", (row) => html`<span class="mono">${row.default || "–"}</span>`],
  ["section", (row) => row.section],
  ["what it is", (row) => row.about, "wide"],
];

export function Settings() {
  const [data, error] = usePolled(`${API}/settings`, 0);
  const [isAll, setAll] = useState(false);
  const rows = (data?.settings ?? []).filter((row) => isAll || row.differs);
  return html`<section class="card" aria-label="Settings">
    <div class="head">
      <h1 class="brand">Settings</h1>
      ${data && html`<span class="muted">Headway ${data.version}, model ${data.models[0]}</span>`}
      <span class="grow"></span>
      <label><input type="checkbox" checked=${isAll} onChange=${(event) => setAll(event.target.checked)} /> also those with their default</label>
    </div>
    <${Failure} error=${error} />
    ${data && html`<${Table} caption=${isAll ? "All settings" : "Settings that differ from their default"} columns=${COLUMNS} rows=${rows}
      keyOf=${(row) => `${row.section}.${row.name}`} empty="Every setting has its default." />`}
    ${data && data.notes.length > 0 && html`<h2>What automatic settings became</h2><ul>${data.notes.map((note) => html`<li key=${note}>${note}</li>`)}</ul>`}
  </section>`;
}
