// Numbers and names as text.

const CAUSES = {
  executor_busy: "the running step",
  token_budget: "token budget",
  prefill_cap: "prefill cap",
  running_limit: "running limit",
  kv_blocks: "KV blocks",
  kv_quota: "KV quota",
  tenant_share: "tenant share",
  tier_order: "tier or priority",
  deadline_order: "deadlines",
  engine_restart: "engine restart",
  router: "router",
  unrecorded: "not recorded",
};
const ORDER = Object.keys(CAUSES);

export const OPEN_WAIT = "still waiting";
export const causeName = (cause) => (Object.hasOwn(CAUSES, cause) ? CAUSES[cause] : cause);
// The place of a cause in the palette is always the same.
export const causeColor = (cause) => Math.max(0, ORDER.indexOf(cause)) % 11;
export const tenantName = (name) => (name === "" ? "(no tenant)" : name);

export function number(value, digits = 0) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${number(value * 1000, value < 0.00995 ? 1 : 0)} ms`;
  return `${number(value, value < 9.95 ? 2 : value < 99.5 ? 1 : 0)} s`;
}

export const percent = (share, digits = 0) =>
  share === null || share === undefined ? "–" : `${number(share * 100, digits)} %`;

export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");

export const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);
