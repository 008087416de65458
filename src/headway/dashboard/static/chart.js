// A chart with a legend, a text summary, and a table of the same numbers.

import { html, useEffect, useRef, useState } from "./vendor/preact.module.js";
import { clock, number } from "./format.js";

const MIN_SPAN_S = 60; // a server that has just started shows a minute
const dark = matchMedia("(prefers-color-scheme: dark)");
const cssValue = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const colorOf = (index) => cssValue(`--s${index % 14}`);

function useTheme() {
  const [isDark, setDark] = useState(dark.matches);
  useEffect(() => {
    const change = () => setDark(dark.matches);
    dark.addEventListener("change", change);
    return () => dark.removeEventListener("change", change);
  }, []);
  return isDark;
}

// Returns the columns that are drawn: for a stack, the running sums, the largest first.
function drawn(series, isStacked) {
  if (!isStacked) return series.map((one) => one.values);
  const sums = [];
  let below = null;
  for (const one of series) {
    below = one.values.map((value, i) => (value ?? 0) + (below ? below[i] : 0));
    sums.push(below);
  }
  return sums.reverse();
}

function options(series, { isStacked, top, height, width, onCursor, band, limits }) {
  const order = isStacked ? [...series].reverse() : series;
  const axis = { stroke: cssValue("--muted"), grid: { stroke: cssValue("--grid"), width: 1 }, ticks: { show: false } };
  const font = "11px system-ui, sans-serif";
  return {
    width,
    height,
    legend: { show: false },
    cursor: { drag: { x: false, y: false }, y: false, points: { show: !isStacked, size: 6 } },
    scales: {
      x: { range: (_plot, min, max) => [Math.min(max - MIN_SPAN_S, Math.max(min, limits.current.from)), max] },
      y: { range: (_plot, _min, max) => [0, Math.max(top ?? 0, (limits.current.most ?? max ?? 0) * 1.05, 1e-3)] },
    },
    axes: [
      { ...axis, font, size: 26, space: 70, values: timeLabels },
      { ...axis, font, size: 46, values: (_plot, splits) => splits.map((value) => short(value)) },
    ],
    series: [
      {},
      ...order.map((one) => ({
        label: one.name,
        stroke: one.isBand ? "transparent" : colorOf(one.color),
        width: isStacked ? 0 : 1.5,
        dash: one.dash,
        fill: isStacked ? colorOf(one.color) : undefined,
        points: { show: false },
        spanGaps: false,
      })),
    ],
    bands: band ? [{ series: band, fill: `${colorOf(10)}44` }] : [],
    hooks: { setCursor: [(plot) => onCursor(plot.cursor.idx ?? null)] },
  };
}

// Labels closer than a minute need seconds.
function timeLabels(_plot, splits) {
  const numChars = splits.length > 1 && splits[1] - splits[0] < 60 ? 8 : 5;
  return splits.map((at) => clock(at).slice(0, numChars));
}

const short = (value) => (value >= 10000 ? `${number(value / 1000)}k` : number(value, value < 1 && value > 0 ? 2 : value % 1 ? 1 : 0));

// The largest value that sets the scale; null if all do.
function mostOf(series) {
  if (!series.some((one) => one.isBand)) return null;
  return Math.max(0, ...series.filter((one) => one.isScale).flatMap((one) => one.values.map((value) => value ?? 0)));
}

function Plot({ times, from, series, isStacked, top, band, summary, onCursor, height = 200 }) {
  const limits = useRef({});
  limits.current = { from, most: mostOf(series) };
  const box = useRef(null);
  const plot = useRef(null);
  const theme = useTheme();
  const shape = JSON.stringify([series.map((one) => [one.name, one.color]), isStacked, theme, band, top]);
  useEffect(() => {
    const width = Math.max(160, box.current.clientWidth);
    const made = new window.uPlot(
      options(series, { isStacked, top, height, width, onCursor, band, limits }),
      [times, ...drawn(series, isStacked)],
      box.current,
    );
    plot.current = made;
    const observer = new ResizeObserver(() => {
      made.setSize({ width: Math.max(160, box.current.clientWidth), height });
    });
    observer.observe(box.current);
    return () => {
      observer.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => {
    plot.current?.setData([times, ...drawn(series, isStacked)]);
  }, [times, series]);
  return html`<div class="plot" ref=${box} role="img" aria-label=${summary}></div>`;
}

const lastValue = (values) => values.findLast((value) => value !== null) ?? null;

function Legend({ series, index, format, isQuiet }) {
  return html`<ul class="legend">
    ${series.filter((one) => !one.isBand).map((one) => {
      const value = index === null ? lastValue(one.values) : one.values[index];
      return html`<li key=${one.name}>
        <span class="swatch" style=${{ background: colorOf(one.color) }}></span>
        <span>${one.name}</span> <b>${isQuiet && index === null ? "" : format(value)}</b>
      </li>`;
    })}
  </ul>`;
}

function ChartTable({ title, times, series, format }) {
  const shown = series.filter((one) => !one.isBand);
  const rows = times.map((at, i) => i).reverse();
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${`Table: ${title}`}>
    <table>
      <caption>${title}, newest first</caption>
      <thead><tr><th scope="col">time</th>${shown.map((one) => html`<th scope="col" class="n">${one.name}</th>`)}</tr></thead>
      <tbody>
        ${rows.map((i) => html`<tr key=${times[i]}>
          <th scope="row">${clock(times[i])}</th>
          ${shown.map((one) => html`<td class="n">${format(one.values[i])}</td>`)}
        </tr>`)}
      </tbody>
    </table>
  </div>`;
}

// `series`: {name, values, color (place in the palette), dash, isBand, isScale}; beside a band, only
// those with isScale set the scale. `from`: when the server started. `isQuiet`: values at the cursor only.
export function Chart({ title, hint, times, from, series, isStacked, top, band, format = (value) => number(value, 1), isWide, isQuiet, children }) {
  const [hasTable, setTable] = useState(false);
  const [index, setIndex] = useState(null);
  const last = series.filter((one) => !one.isBand).map((one) => `${one.name} ${format(one.values.at(-1))}`);
  const summary = `${title}. Now: ${last.join(", ") || "nothing"}.`;
  return html`<section class=${`card ${isWide ? "wide" : ""}`} aria-label=${title}>
    <div class="head">
      <h2>${title}</h2>
      <span class="muted">${index === null ? "" : `at ${clock(times[index])}`}</span>
      <span class="grow"></span>
      <button type="button" aria-expanded=${hasTable} onClick=${() => setTable(!hasTable)}>
        ${hasTable ? "Hide table" : "Table"}<span class="visually-hidden"> of ${title}</span>
      </button>
    </div>
    ${hint && html`<p class="hint">${hint}</p>`}
    ${series.length
      ? html`<${Plot} ...${{ times, from, series, isStacked, top, band, summary, onCursor: setIndex, height: isWide ? 240 : 170 }} />
        <${Legend} ...${{ series, index, format, isQuiet }} />`
      : html`<p class="empty">Nothing in the last ten minutes.</p>`}
    ${hasTable && html`<${ChartTable} ...${{ title, times, series, format }} />`}
    ${children}
  </section>`;
}
