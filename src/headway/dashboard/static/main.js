// The dashboard: key, navigation, and the stream that all pages share.

import { html, render, useEffect, useState } from "./vendor/preact.module.js";
import { getKey, readEvents, send, setKey } from "./client.js";
import { Engines } from "./engines.js";
import { Overview } from "./overview.js";
import { API } from "./parts.js";
import { RequestPage, Requests } from "./requests.js";
import { Settings } from "./settings.js";
import { Tenants } from "./tenants.js";

const RETRY_MS = 2000;
const PAGES = [
  ["", "Overview"],
  ["tenants", "Tenants"],
  ["requests", "Requests"],
  ["engines", "Engines"],
  ["settings", "Settings"],
];

// The id in a hash; a hash that somebody wrote by hand may be no valid encoding.
function decodeId(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

const readHash = () => location.hash.replace(/^#\/?/, "");

function useHash() {
  const [hash, setHash] = useState(readHash());
  useEffect(() => {
    const change = () => setHash(readHash());
    addEventListener("hashchange", change);
    return () => removeEventListener("hashchange", change);
  }, []);
  return hash;
}

// Follows the stream; returns the newest frames, and what is wrong.
function useStream(attempt) {
  const [frames, setFrames] = useState({});
  const [problem, setProblem] = useState(null);
  useEffect(() => {
    const stopped = new AbortController();
    let timer = null;
    const follow = async () => {
      try {
        const response = await send(`${API}/stream`, { signal: stopped.signal });
        setProblem(null);
        for await (const data of readEvents(response)) {
          const frame = JSON.parse(data);
          setFrames((before) => ({ ...before, [frame.type]: frame }));
        }
        throw new Error("the stream ended");
      } catch (failure) {
        if (stopped.signal.aborted) return;
        setProblem(failure);
        if (failure.status !== 401 && failure.status !== 403) timer = setTimeout(follow, RETRY_MS);
      }
    };
    follow();
    return () => {
      stopped.abort();
      clearTimeout(timer);
    };
  }, [attempt]);
  return [frames, problem];
}

function KeyForm({ problem, onKey }) {
  const [key, setText] = useState("");
  const submit = (event) => {
    event.preventDefault();
    setKey(key.trim());
    onKey();
  };
  return html`<form class="card key" onSubmit=${submit}>
    <h1 class="brand">An administrator's key is needed</h1>
    <p class="muted">The key stays in this tab and is sent as a header.</p>
    <label for="key">Key</label>
    <input id="key" type="password" autocomplete="off" spellcheck="false" value=${key} onInput=${(event) => setText(event.target.value)} />
    ${getKey() && html`<p class="error" role="alert">${problem.message}</p>`}
    <button type="submit" class="primary">Continue</button>
  </form>`;
}

function Page({ hash, frames }) {
  const [page, ...rest] = hash.split("/");
  if (page === "tenants") return html`<${Tenants} />`;
  if (page === "requests" && rest.length) return html`<${RequestPage} key=${hash} id=${decodeId(rest.join("/"))} />`;
  if (page === "requests") return html`<${Requests} />`;
  if (page === "engines") return html`<${Engines} />`;
  if (page === "settings") return html`<${Settings} />`;
  return html`<${Overview} now=${frames.now} history=${frames.history} />`;
}

function Status({ problem, now }) {
  if (problem) return html`<span role="status"><span class="dot bad"></span>no connection</span>`;
  const status = now?.status ?? "connecting";
  return html`<span role="status"><span class=${`dot ${status === "ready" ? "good" : ""}`}></span>${status}</span>`;
}

function App() {
  const [attempt, setAttempt] = useState(0);
  const hash = useHash();
  const [frames, problem] = useStream(attempt);
  const needsKey = problem?.status === 401 || problem?.status === 403;
  const page = hash.split("/")[0];
  const forget = () => {
    setKey("");
    setAttempt(attempt + 1);
  };
  useEffect(() => {
    const name = PAGES.find(([path]) => path === page)?.[1] ?? "Overview";
    document.title = `${name} - Headway`;
  }, [page]);
  return html`
    <a class="skip" href="#main" onClick=${(event) => {
      event.preventDefault();
      document.getElementById("main").focus();
    }}>Skip to the content</a>
    <header class="bar">
      <span class="brand">Headway</span>
      <nav aria-label="Pages">
        ${PAGES.map(([path, name]) => html`<a key=${path} href=${`#/${path}`} aria-current=${page === path ? "page" : undefined}>${name}</a>`)}
      </nav>
      <span class="grow"></span>
      <${Status} problem=${problem} now=${frames.now} />
      ${getKey() && html`<button type="button" onClick=${forget}>Forget the key</button>`}
    </header>
    <main id="main" tabindex="-1">
      ${needsKey
        ? html`<${KeyForm} problem=${problem} onKey=${() => setAttempt(attempt + 1)} />`
        : html`<${Page} hash=${hash} frames=${frames} />`}
    </main>`;
}

render(html`<${App} />`, document.getElementById("app"));
