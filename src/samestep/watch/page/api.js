// All data of the page: from the server or, in a report, from the file itself.

import { announce, byId } from "./dom.js";

const AT_ONCE = 4; // a browser has six connections per server, and the stream of changes takes one
const LONGEST_PAUSE = 5000; // milliseconds
const LABELS = {
  connecting: "Connecting", live: "Live", lost: "Not connected, trying again",
};
const embedded = document.getElementById("answers");
const archive = embedded && JSON.parse(embedded.textContent);
const waiting = [];
let running = 0;

export const report = archive?.report ?? null;

/** Return the path of a request. Values are escaped, null ones left out, lists repeated. */
export function path(endpoint, query) {
  const given = Object.entries(query)
    .flatMap(([key, value]) => [value].flat().map((each) => [key, each]))
    .filter(([, value]) => value !== null && value !== undefined);
  return `/api/${endpoint}?${new URLSearchParams(given)}`;
}

/** Return the response to a request, which `signal` can abort. Rejects if there is none. */
export function get(request, signal) {
  if (archive) return fromReport(archive.answers, request);
  return new Promise((resolve, reject) => {
    waiting.push({ request, signal, resolve, reject });
    next();
  });
}

/** Send JSON to the server, and return why it was refused, or an empty text. */
export async function put(endpoint, query, value) {
  const headers = { "Content-Type": "application/json" };
  const options = { method: "PUT", headers, body: JSON.stringify(value) };
  try {
    const response = await fetch(`.${path(endpoint, query)}`, options);
    return response.ok ? "" : (await response.text()) || `status ${response.status}`;
  } catch {
    return "The server does not respond.";
  }
}

/** The server did not respond, or with an error. The page keeps its data and retries later. */
export class NoResponse extends Error {}

/**
 * Return a function of a request and a version that calls `show` with the response if one of them
 * is new. Another request aborts the one in progress; another version of it waits.
 */
export function latest(show) {
  let last = "";
  let abort = null;
  let current;
  return async function load(request, version) {
    const key = `${request} ${version}`;
    if (key === last) return;
    if (abort && current === request) {
      abort.next = version;
      return;
    }
    abort?.abort();
    const mine = (abort = new AbortController());
    [last, current] = [key, request];
    try {
      const response = await get(request, mine.signal);
      if (mine === abort) show(response);
    } catch (error) {
      if (mine === abort) last = "";
      if (!mine.signal.aborted && !(error instanceof NoResponse)) throw error;
    }
    if (mine !== abort) return;
    abort = null;
    if ("next" in mine) load(request, mine.next);
  };
}

/** Return the URL of an image: on the server, or embedded in a report; null if it was left out. */
export function imageUrl(id, number) {
  const request = path("image", { id, number });
  return archive ? (archive.answers[request] ?? null) : `.${request}`;
}

function next() {
  while (running < AT_ONCE && waiting.length) {
    const { request, signal, resolve, reject } = waiting.shift();
    if (signal?.aborted) {
      reject(signal.reason);
      continue;
    }
    running += 1;
    fromServer(request, signal).then(resolve, reject).finally(() => {
      running -= 1;
      next();
    });
  }
}

async function fromServer(request, signal) {
  let response;
  try {
    const options = { signal, credentials: "same-origin", cache: "no-store" };
    response = await fetch(`.${request}`, options);
  } catch (error) {
    throw signal?.aborted ? error : new NoResponse("The server does not respond.");
  }
  if (response.ok) return response.json();
  const text = (await response.text()).slice(0, 200);
  throw new NoResponse(`The server responded ${response.status}: ${text}`);
}

/** A report holds complete curves, not smoothed: do here what the server would do. */
async function fromReport(responses, request) {
  const { pathname, searchParams } = new URL(request, "samestep:/");
  const isSeries = ["/api/curve", "/api/timing", "/api/system"].includes(pathname);
  const { from, to, smooth, points, ...rest } = Object.fromEntries(searchParams);
  const whole = responses[isSeries ? `${pathname}?${new URLSearchParams(rest)}` : request];
  if (!whole) throw new Error(`the report has no response to ${request}`);
  if (!isSeries || pathname === "/api/system") return whole;
  const [first, last] = indices(whole.x, Number(from ?? -Infinity), Number(to ?? Infinity));
  const cut = (value) => { // the lists in it, which have an entry for each x
    if (value === null || typeof value !== "object") return value;
    if (!Array.isArray(value)) {
      return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, cut(inner)]));
    }
    return Array.isArray(value[0]) ? value.map(cut) : value.slice(first, last);
  };
  const average = Number(smooth) > 0 ? movingAverage(whole, Number(smooth)) : null;
  return cut(pathname === "/api/curve" ? { ...whole, smooth: average } : whole);
}

/** Return the indices of a range in a sorted list, plus a neighbor on each side. */
function indices(x, from, to) {
  const inside = (value) => value >= from && value <= to;
  const first = x.findIndex(inside);
  if (first < 0) return [0, 0];
  return [Math.max(0, first - 1), Math.min(x.length, x.findLastIndex(inside) + 2)];
}

/** Return a moving average, corrected for its start. Omitted points count by their distance. */
function movingAverage({ x, value, points }, weight) {
  const spacing = (x.at(-1) - x[0]) / Math.max(1, points - 1) || 1;
  let [sum, total, before] = [0, 0, x[0]];
  return value.map((current, index) => {
    if (current === null) return null;
    const decay = weight ** Math.max(1, (x[index] - before) / spacing);
    before = x[index];
    sum = decay * sum + (1 - decay) * current;
    total = decay * total + (1 - decay);
    return sum / total;
  });
}

/** Call `changed(ids)` for runs with news, and `changed(null)` after each new connection. */
export function listen(changed) {
  if (report) return showConnection("report");
  let pause = 500;
  let source;
  let timer;
  const connect = () => {
    clearTimeout(timer);
    source?.close();
    source = new EventSource("./api/changes");
    source.addEventListener("open", () => {
      pause = 500;
      showConnection("live");
      changed(null);
    });
    source.addEventListener("message", (event) => changed(JSON.parse(event.data).ids));
    source.addEventListener("error", () => {
      source.close(); // the browser's own retries end for good at a response such as 503
      showConnection("lost");
      timer = setTimeout(connect, pause);
      pause = Math.min(LONGEST_PAUSE, pause * 2);
    });
  };
  addEventListener("online", connect);
  addEventListener("pagehide", () => source.close());
  addEventListener("pageshow", (event) => event.persisted && connect());
  connect();
}

function showConnection(now) {
  const element = byId("connection");
  const before = element.dataset.state;
  element.dataset.state = now;
  element.lastElementChild.textContent = element.title = LABELS[now] ?? report.text;
  if (now === "lost" && before === "live") announce("Lost the connection. Trying again.");
  if (now === "live" && before === "lost") announce("Connected again.");
}
