// Requests: the slowest now, and one request with its waterfall.

import { html, useState } from "./vendor/preact.module.js";
import { send } from "./client.js";
import { colorOf } from "./chart.js";
import { OPEN_WAIT, causeColor, causeName, clock, number, percent, seconds, sum, tenantName } from "./format.js";
import { API, Confirm, Failure, RequestLink, Table, usePolled } from "./parts.js";

const COLUMNS = [
  ["request", (row) => html`<${RequestLink} id=${row.id} />`],
  ["tenant", (row) => tenantName(row.tenant)],
  ["state", (row) => row.reason || row.state],
  ["time", (row) => seconds(row.age_s), "n"],
  ["waited", (row) => seconds(row.wait_s), "n"],
  ["prompt tokens", (row) => number(row.num_prompt_tokens), "n"],
  ["output tokens", (row) => number(row.num_output_tokens), "n"],
];

export function Requests() {
  const [data, error] = usePolled(`${API}/requests`);
  const [id, setId] = useState("");
  const open = (event) => {
    event.preventDefault();
    if (id.trim()) location.hash = `#/requests/${encodeURIComponent(id.trim())}`;
  };
  return html`<section class="card" aria-label="Requests">
      <div class="head"><h1 class="brand">Requests</h1></div>
      <form class="form" onSubmit=${open}>
        <label for="request-id">Id of a request, or its X-Request-Id</label>
        <input id="request-id" type="search" maxlength="128" spellcheck="false" value=${id} onInput=${(event) => setId(event.target.value)} />
        <button type="submit" class="primary">Show</button>
      </form>
      <${Failure} error=${error} />
    </section>
    ${data && html`
      <section class="card" aria-label="Slowest now">
        <div class="head"><h2>Slowest now</h2><span class="muted">the oldest of ${number(data.num_live)} live requests</span></div>
        <${Table} caption="Live requests, the oldest first" columns=${COLUMNS} rows=${data.live} keyOf=${(row) => row.id} empty="No request is live." />
      </section>
      <section class="card" aria-label="Slowest of the last">
        <div class="head"><h2>Slowest of the last ${number(data.num_ended)} that ended</h2></div>
        <${Table} caption="Ended requests, the slowest first" columns=${COLUMNS} rows=${data.ended} keyOf=${(row) => row.id} empty="No request has ended yet." />
      </section>`}`;
}

// Cuts the life of each part into pieces: waits by cause, prefill, decode.
export function piecesOf(account) {
  const rows = new Map();
  const rowOf = (name) => {
    if (!rows.has(name)) rows.set(name, { name, pieces: [], marks: [], runsFrom: null, phase: "prefill" });
    return rows.get(name);
  };
  const wait = (row, entry) => {
    let at = entry.at_s;
    for (const { cause, seconds: length, held_by } of entry.causes ?? []) {
      row.pieces.push({ kind: causeName(cause), color: causeColor(cause), at, length, note: held_by ? `held mostly by ${held_by}` : "" });
      at += length;
    }
  };
  const endRun = (row, at) => {
    if (row.runsFrom !== null) {
      const isPrefill = row.phase === "prefill";
      row.pieces.push({ kind: row.phase, color: isPrefill ? 12 : 13, isRun: true, at: row.runsFrom, length: at - row.runsFrom, note: "" });
    }
    row.runsFrom = null;
  };
  for (const entry of account.timeline ?? []) {
    const row = rowOf(entry.part ?? "");
    if (entry.kind === "waited") wait(row, entry);
    else if (entry.kind === "waiting") row.pieces.push({ kind: OPEN_WAIT, color: 11, at: entry.at_s, length: entry.seconds ?? 0, note: "" });
    else if (entry.kind === "admitted") row.runsFrom = entry.at_s;
    else if (entry.kind === "first_token") {
      // A sample that was forked has no admission of its own.
      if (row.runsFrom !== null) endRun(row, entry.at_s);
      row.runsFrom = entry.at_s;
      row.phase = "decode";
    } else if (entry.kind === "preempted" || entry.kind === "engine_lost") {
      endRun(row, entry.at_s);
      row.marks.push({ at: entry.at_s, kind: entry.kind === "preempted" ? "preempted" : "engine lost" });
    } else if (entry.kind === "finished") endRun(row, entry.at_s);
  }
  for (const row of rows.values()) if (account.state !== "finished") endRun(row, account.duration_s);
  return [...rows.values()].filter((row) => row.pieces.length);
}

function Waterfall({ account }) {
  const rows = piecesOf(account);
  const life = Math.max(account.duration_s, 1e-9);
  const place = (piece) => ({ left: `${(100 * piece.at) / life}%`, width: `${(100 * piece.length) / life}%`, background: colorOf(piece.color) });
  const kinds = new Map(rows.flatMap((row) => row.pieces).map((piece) => [piece.kind, piece.color]));
  const pieces = rows.flatMap((row) => row.pieces.map((piece) => ({ ...piece, part: row.name })));
  const total = sum(pieces.map((piece) => piece.length));
  const columns = [
    ["part", (piece) => piece.part || "first"],
    ["what", (piece) => (piece.isRun ? piece.kind : `waited: ${piece.kind}`)],
    ["from", (piece) => seconds(piece.at), "n"],
    ["time", (piece) => seconds(piece.length), "n"],
    ["share", (piece) => percent(piece.length / life, 1), "n"],
    ["", (piece) => piece.note],
  ];
  return html`<section class="card" aria-label="Waterfall">
    <div class="head"><h2>Waterfall</h2><span class="muted">Causes of one wait are drawn one after the other.</span></div>
    <div class="fall" role="img" aria-label=${`Waterfall of ${seconds(account.duration_s)}; the table below has its pieces`}>
      ${rows.map((row) => html`<div class="row" key=${row.name}>
        <span class="muted">${row.name || "request"}</span>
        <div class="track">
          ${row.pieces.map((piece) => html`<div class="piece" title=${`${piece.kind}: ${seconds(piece.length)}`} style=${place(piece)}></div>`)}
          ${row.marks.map((mark) => html`<div class="mark" title=${mark.kind} style=${{ left: `${(100 * mark.at) / life}%` }}></div>`)}
        </div>
      </div>`)}
    </div>
    <div class="scale" aria-hidden="true"><span>0</span><span>${seconds(life / 2)}</span><span>${seconds(life)}</span></div>
    <ul class="legend">
      ${[...kinds].map(([kind, color]) => html`<li key=${kind}><span class="swatch" style=${{ background: colorOf(color) }}></span>${kind}</li>`)}
    </ul>
    <${Table} caption="Pieces" columns=${columns} rows=${pieces} empty="Nothing happened yet." />
    <p id="pieces-sum" class="hint" data-total=${total} data-duration=${account.duration_s}>
      ${rows.length === 1 ? `The pieces add up to ${seconds(total)} of ${seconds(account.duration_s)}.` : ""}
    </p>
  </section>`;
}

function Facts({ account }) {
  const facts = [
    ["state", account.finish_reason ? `${account.state} (${account.finish_reason})` : account.state],
    ["tenant", tenantName(account.tenant ?? "")],
    ["tier", account.tier || "–"],
    ["arrived", clock(account.arrived_at)],
    ["time", seconds(account.duration_s)],
    ["first token after", seconds(account.first_token_s)],
    ["waited", seconds(account.queue_s ?? 0)],
    ["prompt tokens", `${number(account.num_prompt_tokens ?? 0)}, ${number(account.num_cached_tokens ?? 0)} cached`],
    ["output tokens", number(account.num_output_tokens ?? 0)],
    ["preemptions", number(account.num_preemptions ?? 0)],
    ["engines lost", number(account.num_engines_lost ?? 0)],
    ["block-seconds", number(account.kv_block_s ?? 0, 1)],
    ["client's id", account.client_id || "–"],
  ];
  return html`<dl class="facts">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

export function RequestPage({ id }) {
  const path = `${API}/requests/${encodeURIComponent(id)}`;
  const [isOver, setOver] = useState(false);
  const [account, error, read] = usePolled(path, isOver ? 0 : 1000);
  const [message, setMessage] = useState("");
  if (account?.state === "finished" && !isOver) setOver(true);
  const abort = async () => {
    try {
      await send(path, { method: "DELETE" });
      setMessage("Aborted.");
    } catch (failure) {
      setMessage(failure.message);
    }
    read();
  };
  return html`<section class="card" aria-label="Request">
      <div class="head">
        <h1 class="brand mono">${id}</h1><span class="grow"></span>
        ${account && account.state !== "finished" && html`<${Confirm} isDanger label="Abort" question="Really abort?" onConfirm=${abort} />`}
      </div>
      <p role="status" class="hint">${message}</p>
      <${Failure} error=${error} />
      ${account && html`<p>${account.text}</p><${Facts} account=${account} />`}
    </section>
    ${account && html`<${Waterfall} account=${account} />`}`;
}
