// News from the server. A connection that breaks is told, tried again with growing pauses, and all is asked anew when it is back.

import { announce, byId } from "./dom.js";
import { report } from "./get.js";

const LABELS = { connecting: "Connecting", live: "Live", lost: "Not connected, trying again", report: "Report" };
const LONGEST_PAUSE = 5000;

/** Call `changed(ids)` for runs with news, and `changed(null)` for all when the connection is new. */
export function listen(changed) {
  if (report) return show("report");
  let pause = 500;
  let source;
  let timer;
  const connect = () => {
    clearTimeout(timer);
    source?.close();
    source = new EventSource("./api/changes");
    source.addEventListener("open", () => {
      pause = 500;
      show("live");
      changed(null);
    });
    source.addEventListener("message", (event) => changed(JSON.parse(event.data).ids));
    source.addEventListener("error", () => {
      source.close(); // the browser's own tries end for good at an answer such as 503
      show("lost");
      timer = setTimeout(connect, pause);
      pause = Math.min(LONGEST_PAUSE, pause * 2);
    });
  };
  addEventListener("online", connect);
  addEventListener("pagehide", () => source.close());
  addEventListener("pageshow", (event) => event.persisted && connect());
  connect();
}

function show(now) {
  const place = byId("connection");
  const before = place.dataset.state;
  place.dataset.state = now;
  place.lastElementChild.textContent = LABELS[now];
  if (now === "lost" && before === "live") announce("The connection to the server is lost. Trying again.");
  if (now === "live" && before === "lost") announce("Connected again.");
}
