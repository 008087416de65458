// Engines of this server or frontend: load, cache, placement; drain and log level of this process.

import { html, useState } from "./vendor/preact.module.js";
import { send } from "./client.js";
import { clock, number, percent, seconds } from "./format.js";
import { API, Confirm, Failure, Table, usePolled } from "./parts.js";

function stateOf(engine) {
  if (engine.is_retired) return [engine.num_own ? "draining" : "retired", ""];
  if (engine.is_ready) return ["ready", "good"];
  return engine.is_up ? ["stalled", ""] : ["down", "bad"];
}

function Engine({ engine, isFrontend }) {
  const [state, kind] = stateOf(engine);
  const { info } = engine;
  const facts = [
    ["running", number(engine.num_running)],
    ["waiting", number(engine.num_waiting)],
    ["last step", seconds(engine.step_s)],
    ["token budget", number(engine.token_budget)],
    ...(isFrontend
      ? [
          ["of this frontend", number(engine.num_own)],
          ["sent by the router", number(engine.num_routed)],
        ]
      : []),
    ["cached blocks", number(engine.num_blocks_cached)],
    ...(info
      ? [
          ["KV blocks", `${number(info.capacity.num_blocks)} of ${number(info.capacity.block_size)} tokens`],
          ["longest request", `${number(info.capacity.max_model_len)} tokens`],
          ["most sequences", number(info.max_num_seqs)],
          ["policy", info.scheduling_policy],
          ["weights, KV", `${info.dtype}, ${info.kv_dtype}`],
          ["kernels", info.kernels ?? "none"],
        ]
      : []),
  ];
  return html`<section class="card" aria-label=${`Engine ${engine.name}`}>
    <div class="head"><h2 class="mono">${engine.name}</h2><span><span class=${`dot ${kind}`}></span>${state}</span></div>
    <p class="hint">KV blocks in use: ${percent(engine.kv_usage)}</p>
    <div class="meter" aria-hidden="true"><div style=${{ width: `${100 * engine.kv_usage}%` }}></div></div>
    <dl class="facts">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
  </section>`;
}

// Who decides for this frontend, and what these pages count.
function Placement({ data }) {
  const { routers, rule } = data;
  const decides = routers.length
    ? `The router at ${routers.join(" or ")} decides for all frontends that share it (rule: ${rule} while this frontend decides by itself).`
    : `This frontend decides by itself which engine gets a request (rule: ${rule}).`;
  return html`<p class="hint">${decides} Running and waiting count the requests of all frontends in an engine${routers.length ? ", and the table of frontends those of each" : ""};
    all else on these pages is of this frontend alone. Other frontends have pages of their own.</p>`;
}

const FRONTENDS = [
  ["frontend", (one) => html`<span class="mono">${one.name}</span>${one.is_own ? " (this one)" : ""}`],
  ["waiting in the router", (one) => number(one.num_waiting), "n"],
  ["in engines", (one) => number(one.num_sent), "n"],
  ["engines it reaches", (one) => number(one.num_engines), "n"],
];

function Frontends({ data }) {
  return html`<section class="card" aria-label="Frontends">
    <div class="head"><h2>Frontends</h2></div>
    <${Table} caption="Frontends that share the router, once a second" columns=${FRONTENDS} rows=${data.frontends} keyOf=${(one) => one.name}
      empty="This frontend decides by itself now: no router answers." />
  </section>`;
}

export function Engines() {
  const [data, error, read] = usePolled(`${API}/engines`);
  const [message, setMessage] = useState("");
  const act = async (path, body, done) => {
    try {
      await send(`${API}/${path}`, { method: "POST", body });
      setMessage(done);
    } catch (failure) {
      setMessage(failure.message);
    }
    read();
  };
  const restarts = [
    ["time", (one) => clock(one.at)],
    ["reason", (one) => one.reason],
    ["requests sent again", (one) => number(one.num_resubmitted), "n"],
  ];
  return html`<section class="card" aria-label="This server">
      <div class="head"><h1 class="brand">Engines</h1><span class="muted">of this ${data?.is_frontend ? "frontend" : "server"}: ${data?.status ?? "…"}</span></div>
      ${data?.is_frontend && html`<${Placement} data=${data} />`}
      <${Failure} error=${error} />
      <div class="form">
        ${data && (data.is_paused
          ? html`<button type="button" onClick=${() => act("drain", { drain: false }, "New requests are accepted.")}>Accept requests again</button>`
          : html`<${Confirm} isDanger label="Drain" question="Really refuse new requests?" onConfirm=${() => act("drain", { drain: true }, "New requests are refused; those there are go on.")} />`)}
        <label for="level">Log level</label>
        <select id="level" onChange=${(event) => event.target.value && act("log-level", { level: event.target.value }, `The log level is ${event.target.value}.`)}>
          <option value="">choose</option>
          ${["debug", "info", "warning", "error"].map((level) => html`<option value=${level}>${level}</option>`)}
        </select>
        <span role="status" class="muted">${message}</span>
      </div>
    </section>
    <div class="grid">${(data?.engines ?? []).map((engine) => html`<${Engine} key=${engine.name} engine=${engine} isFrontend=${data.is_frontend} />`)}</div>
    ${data?.routers.length > 0 && html`<${Frontends} data=${data} />`}
    ${data && html`<section class="card" aria-label="Restarts">
      <div class="head"><h2>Restarts</h2></div>
      <${Table} caption="The last restarts" columns=${restarts} rows=${data.restarts} empty="None since the server started." />
    </section>`}`;
}
