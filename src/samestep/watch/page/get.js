// Every answer that the page shows comes through `get`: from the server, or in a report from the file itself.

import { answerFrom } from "./archive.js";

const AT_ONCE = 4; // a browser has six connections to a server, and one is taken by the changes
const embedded = document.getElementById("answers");
const archive = embedded && JSON.parse(embedded.textContent);
const waiting = [];
let running = 0;

export const report = archive?.report ?? null;

/** Make the path of a question; names and ids are escaped, and what is null is left out. */
export function path(place, query) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
  return `/api/${place}?${new URLSearchParams(given)}`;
}

/** Return the answer to a path. A question that `signal` takes back before its turn is never asked. Rejects where there is no answer. */
export function get(question, signal) {
  if (archive) return answerFrom(archive.answers, question);
  return new Promise((resolve, reject) => {
    waiting.push({ question, signal, resolve, reject });
    next();
  });
}

/** Nobody answered, or not with what was asked for. What was shown stays, and is asked for again with the next news. */
export class NoAnswer extends Error {}

/**
 * Return a function of a question and a version, which gives the answer to `show` whenever one of them is new.
 * Another question takes back the one under way; another version of the same waits for it.
 */
export function following(show) {
  let last = "";
  let abort = null;
  let current;
  return async function follow(question, version) {
    const key = `${question} ${version}`;
    if (key === last) return;
    if (abort && current === question) {
      abort.next = version;
      return;
    }
    abort?.abort();
    const mine = (abort = new AbortController());
    [last, current] = [key, question];
    try {
      const answer = await get(question, mine.signal);
      if (mine === abort) show(answer);
    } catch (error) {
      if (mine === abort) last = "";
      if (!mine.signal.aborted && !(error instanceof NoAnswer)) throw error;
    }
    if (mine !== abort) return;
    abort = null;
    if ("next" in mine) follow(question, mine.next);
  };
}

/** The address of an image: the server's, or the image itself in a report; null where a report left it out. */
export function imageAddress(id, number) {
  const question = path("image", { id, number });
  return archive ? (archive.answers[question] ?? null) : `.${question}`;
}

function next() {
  while (running < AT_ONCE && waiting.length) {
    const { question, signal, resolve, reject } = waiting.shift();
    if (signal?.aborted) {
      reject(signal.reason);
      continue;
    }
    running += 1;
    ask(question, signal)
      .then(resolve, reject)
      .finally(() => {
        running -= 1;
        next();
      });
  }
}

async function ask(question, signal) {
  let answer;
  try {
    answer = await fetch(`.${question}`, { signal, credentials: "same-origin", cache: "no-store" });
  } catch (error) {
    throw signal?.aborted ? error : new NoAnswer("The server does not answer.");
  }
  if (!answer.ok) throw new NoAnswer(`The server answered ${answer.status}: ${(await answer.text()).slice(0, 200)}`);
  return answer.json();
}
