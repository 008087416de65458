// Small components that several pages use.

import { html, useEffect, useState } from "./vendor/preact.module.js";
import { getJson } from "./client.js";

export const API = "/dashboard/api";

// Reads a path again and again while the page is open; returns [data, error, read].
export function usePolled(path, everyMs = 2000) {
  const [data, setData] = useState(null);
  const [error, setError] = useState(null);
  const [count, setCount] = useState(0);
  useEffect(() => {
    const stopped = new AbortController();
    let timer = null;
    const read = async () => {
      try {
        setData(await getJson(path, { signal: stopped.signal }));
        setError(null);
      } catch (failure) {
        if (stopped.signal.aborted) return;
        setError(failure);
      }
      if (everyMs) timer = setTimeout(read, everyMs);
    };
    read();
    return () => {
      stopped.abort();
      clearTimeout(timer);
    };
  }, [path, everyMs, count]);
  return [data, error, () => setCount((before) => before + 1)];
}

// `columns`: [title, row => cell, kind]; kind is "n" for a number, "wide" for a sentence.
export function Table({ caption, columns, rows, keyOf, empty = "None." }) {
  if (!rows.length) return html`<p class="empty">${empty}</p>`;
  return html`<div class="scroll tall" tabindex="0" role="region" aria-label=${caption}>
    <table>
      <caption>${caption}</caption>
      <thead><tr>${columns.map(([title, , kind]) => html`<th scope="col" class=${kind === "n" ? "n" : ""}>${title}</th>`)}</tr></thead>
      <tbody>
        ${rows.map((row, i) => html`<tr key=${keyOf ? keyOf(row) : i}>
          ${columns.map(([, cell, kind]) => html`<td class=${kind ?? "name"}>${cell(row)}</td>`)}
        </tr>`)}
      </tbody>
    </table>
  </div>`;
}

export const Failure = ({ error }) => error && html`<p class="error" role="alert">${error.message}</p>`;

export const RequestLink = ({ id }) => html`<a class="mono id" title=${id} href=${`#/requests/${encodeURIComponent(id)}`}>${id}</a>`;

// A button that acts on its second click.
export function Confirm({ label, question, onConfirm, isDanger }) {
  const [isAsked, setAsked] = useState(false);
  useEffect(() => {
    if (!isAsked) return undefined;
    const timer = setTimeout(() => setAsked(false), 5000);
    return () => clearTimeout(timer);
  }, [isAsked]);
  const click = () => {
    setAsked(!isAsked);
    if (isAsked) onConfirm();
  };
  return html`<button type="button" class=${isDanger ? "danger" : ""} onClick=${click}>${isAsked ? question : label}</button>`;
}
