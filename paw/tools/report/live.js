"use strict";

// The page while its runs go on, for `paw view`: new episodes are added to the table, and the rest of
// the page is replaced when metrics have been written. A page that nobody looks at asks for nothing.

const POLL_MS = 2000;

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error(`answer ${answer.status}`);
  return answer;
}

/** Add what run number `index` has written since the last time. Returns whether that is anything. */
async function addRows(index) {
  const run = page.runs[index];
  const query = `generation=${run.generation}&from=${run.rows.length}`;
  const changes = await (await ask(`${run.url}changes?${query}`)).json();
  const isRewritten = changes.generation !== run.generation;
  if (isRewritten) run.rows = [];
  run.generation = changes.generation;
  run.rows.push(...changes.rows);
  const hasNewMetrics = changes.version !== run.version;
  run.version = changes.version;
  return { hasNewRows: isRewritten || changes.rows.length > 0, hasNewMetrics };
}

/** Replace everything but the episodes with what the server shows now. */
async function replaceRest() {
  const text = await (await ask(location.pathname + location.search)).text();
  const fresh = new DOMParser().parseFromString(text, "text/html");
  for (const id of ["before", "after"]) {
    const part = fresh.getElementById(id);
    if (!part) return;
    const old = document.getElementById(id);
    const wasOpen = [...old.querySelectorAll("details")].map((details) => details.open);
    part.querySelectorAll("details").forEach((details, place) => {
      details.open = Boolean(wasOpen[place]);
    });
    old.replaceWith(document.importNode(part, true));
  }
}

const rest = { isStale: false, isBeingReplaced: false };

/** Replace the rest if it is stale. Drawing takes seconds, and episodes do not wait for it. */
async function refreshRest() {
  if (rest.isBeingReplaced) return;
  rest.isBeingReplaced = true;
  try {
    while (rest.isStale) {
      rest.isStale = false;
      await replaceRest();
    }
  } catch {
    rest.isStale = true; // the next poll tries again, and reports what is wrong
  } finally {
    rest.isBeingReplaced = false;
  }
}

async function poll() {
  const status = document.getElementById("live");
  if (!document.hidden) {
    try {
      const answers = [];
      for (let index = 0; index < page.runs.length; index += 1) answers.push(await addRows(index));
      if (answers.some((answer) => answer.hasNewRows)) drawTable();
      if (answers.some((answer) => answer.hasNewMetrics)) rest.isStale = true;
      refreshRest();
      status.textContent = `live · looked at ${new Date().toLocaleTimeString()}`;
      status.classList.remove("trouble");
    } catch (error) {
      status.textContent = `paw view does not answer (${error.message}); asking again`;
      status.classList.add("trouble");
    }
  }
  setTimeout(poll, POLL_MS);
}

if (page.live) poll();
