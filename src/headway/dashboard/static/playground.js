// Chat with the server under the user's own key. All text is set with textContent.

import { getJson, getKey, readEvents, send, setKey } from "./client.js";
import { number, seconds } from "./format.js";

const LATE = 3; // a piece is late if it took so many times the median
const $ = (id) => document.getElementById(id);
const PLACEHOLDER = $("prompt").placeholder;
const messages = [];
let pending = []; // calls of the last answer that have no result yet
let stopper = null;
let lastId = "";

function element(kind, className, text = "") {
  const made = document.createElement(kind);
  made.className = className;
  made.textContent = text;
  return made;
}

function addMessage(role, content) {
  const item = element("li", role);
  const text = element("div", "text", content);
  item.append(element("div", "who", role), text);
  $("messages").append(item);
  item.scrollIntoView({ block: "nearest" });
  return text;
}

function showError(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

async function loadModels() {
  try {
    const { data } = await getJson("/v1/models");
    $("model").replaceChildren(...data.map(({ id }) => {
      const option = element("option", "", id);
      option.value = id;
      return option;
    }));
    $("status").textContent = "ready";
    showError("");
  } catch (failure) {
    $("status").textContent = failure.status === 401 ? "a key is needed" : "not connected";
    if (getKey() || failure.status !== 401) showError(failure.message);
  }
}

function numberOf(id) {
  const text = $(id).value.trim();
  return text === "" ? undefined : Number(text);
}

// The value of a text box with JSON; nothing if it is empty.
function jsonOf(id, name) {
  const text = $(id).value.trim();
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (failure) {
    throw new Error(`${name}: not valid JSON (${failure.message})`);
  }
}

function formatOf() {
  const type = $("format").value;
  if (type === "text") return undefined;
  if (type === "json_object") return { type };
  const schema = jsonOf("schema", "JSON schema");
  if (schema === undefined) throw new Error("JSON schema: say which");
  return { type, json_schema: { name: "answer", schema } };
}

function makeBody() {
  const system = $("system").value.trim();
  return {
    model: $("model").value || undefined,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    max_tokens: numberOf("max_tokens"),
    temperature: numberOf("temperature"),
    top_p: numberOf("top_p"),
    seed: numberOf("seed"),
    response_format: formatOf(),
    tools: jsonOf("tools", "Tools"),
    stream: true,
    stream_options: { include_usage: true },
  };
}

function drawStrip(startedAt, times, isOver) {
  const end = Math.max(times.at(-1) ?? startedAt, startedAt + 1);
  const life = end - startedAt;
  const gaps = times.slice(1).map((at, i) => at - times[i]);
  const median = [...gaps].sort((a, b) => a - b)[Math.floor(gaps.length / 2)] ?? 0;
  const wait = element("div", "wait");
  wait.style.width = `${(100 * ((times[0] ?? end) - startedAt)) / life}%`;
  const marks = times.map((at, i) => {
    const mark = element("div", i && gaps[i - 1] > LATE * median ? "token late" : "token");
    mark.style.left = `${Math.min(99.8, (100 * (at - startedAt)) / life)}%`;
    return mark;
  });
  $("strip").replaceChildren(wait, ...marks);
  if (!times.length) return;
  const first = seconds((times[0] - startedAt) / 1000);
  const text = `First piece after ${first}, ${number(times.length)} pieces in ${seconds(life / 1000)}, median gap ${seconds(median / 1000)}.`;
  $("strip").setAttribute("aria-label", text);
  $("timing").textContent = isOver ? text : `${text} …`;
}

// Adds the parts of calls that a chunk has.
function addCalls(calls, parts) {
  for (const part of parts) {
    if (!calls.has(part.index)) calls.set(part.index, { id: "", type: "function", function: { name: "", arguments: "" } });
    const call = calls.get(part.index);
    call.id ||= part.id ?? "";
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
  }
}

const callText = (call) => `${call.function.name}(${call.function.arguments})`;

// Shows an answer while it comes; returns its message.
async function readAnswer(response, text, startedAt) {
  const times = [];
  const calls = new Map();
  let content = "";
  let reason = null;
  let usage = null;
  let drawnAt = 0;
  for await (const data of readEvents(response)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    lastId = chunk.id ?? lastId;
    usage = chunk.usage ?? usage;
    const [choice] = chunk.choices ?? [];
    reason = choice?.finish_reason ?? reason;
    const delta = choice?.delta ?? {};
    const parts = delta.tool_calls ?? [];
    if (delta.content || parts.length) {
      times.push(performance.now());
      content += delta.content ?? "";
      addCalls(calls, parts);
      text.textContent = [content, ...[...calls.values()].map(callText)].filter(Boolean).join("\n");
      if (times.at(-1) - drawnAt > 100) {
        drawnAt = times.at(-1);
        drawStrip(startedAt, times, false);
        text.scrollIntoView({ block: "end" });
      }
    }
  }
  drawStrip(startedAt, times, true);
  if (usage) $("timing").textContent += ` ${number(usage.prompt_tokens)} prompt and ${number(usage.completion_tokens)} output tokens.`;
  // Calls that were cut off are text.
  if (reason !== "tool_calls") return { role: "assistant", content: text.textContent };
  return { role: "assistant", content: content || null, tool_calls: [...calls.values()] };
}

// The next input is a message, or the result of the next call.
function askNext() {
  const [call] = pending;
  $("prompt").placeholder = call ? `Result of ${callText(call)}; Ctrl+Enter sends` : PLACEHOLDER;
}

function addInput(prompt) {
  const call = pending.shift();
  messages.push(call ? { role: "tool", tool_call_id: call.id, content: prompt } : { role: "user", content: prompt });
  const shown = addMessage(call ? "tool" : "user", prompt);
  $("prompt").value = "";
  askNext();
  return () => {
    messages.pop();
    shown.parentElement.remove();
    if (call) pending.unshift(call);
    if (!$("prompt").value) $("prompt").value = prompt;
    askNext();
  };
}

async function ask(event) {
  event?.preventDefault();
  const prompt = $("prompt").value.trim();
  if (!prompt || stopper) return;
  showError("");
  $("explanation").hidden = true;
  const takeBack = addInput(prompt);
  if (pending.length) return;
  stopper = new AbortController();
  setBusy(true);
  const text = addMessage("assistant", "");
  const startedAt = performance.now();
  drawStrip(startedAt, [], false);
  let answer = null;
  try {
    const response = await send("/v1/chat/completions", { method: "POST", body: makeBody(), signal: stopper.signal });
    answer = await readAnswer(response, text, startedAt);
  } catch (failure) {
    if (failure.name === "AbortError") $("status").textContent = "stopped";
    else showError(failure.message);
  }
  // What came before an error or a stop is a part of the conversation, as text.
  if (text.isConnected) {
    if (text.textContent) messages.push(answer ?? { role: "assistant", content: text.textContent });
    else {
      takeBack();
      text.parentElement.remove();
    }
    pending.push(...(answer?.tool_calls ?? []));
    askNext();
  }
  stopper = null;
  setBusy(false);
}

function setBusy(isBusy) {
  $("send").disabled = isBusy;
  $("stop").disabled = !isBusy;
  $("explain").disabled = isBusy || !lastId;
  if (isBusy) $("status").textContent = "answering";
  else if ($("status").textContent === "answering") $("status").textContent = "ready";
}

async function explain() {
  try {
    const account = await getJson(`/v1/requests/${encodeURIComponent(lastId)}/explanation`);
    $("explanation-text").textContent = account.text;
    $("explanation-timeline").textContent = account.timeline_text;
    $("explanation").hidden = false;
  } catch (failure) {
    showError(failure.message);
  }
}

function clear() {
  stopper?.abort();
  messages.length = 0;
  pending = [];
  askNext();
  $("messages").replaceChildren();
  $("explanation").hidden = true;
  showError("");
}

function showFormat() {
  $("format-hint").hidden = $("format").value === "text";
  $("schema-label").hidden = $("format").value !== "json_schema";
}

$("key").value = getKey();
$("key").addEventListener("change", () => {
  setKey($("key").value.trim());
  loadModels();
});
$("format").addEventListener("change", showFormat);
$("options").addEventListener("submit", (event) => event.preventDefault());
$("ask").addEventListener("submit", ask);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask(event);
});
$("stop").addEventListener("click", () => stopper?.abort());
$("clear").addEventListener("click", clear);
$("explain").addEventListener("click", explain);
showFormat();
loadModels();
