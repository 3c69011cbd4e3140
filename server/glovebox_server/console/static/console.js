"use strict";
// What changes while a page is open: its live parts, the sign of life, and the check of a receipt.

const STALE_MS = 5000;
const policy = trustedTypes?.createPolicy("glovebox", { createHTML: (html) => html });
const alive = document.getElementById("alive");
let heard = Date.now();
let loading = false;

// The server has escaped all text in its pages; nothing else comes through here.
function parse(html) {
  return new DOMParser().parseFromString(policy ? policy.createHTML(html) : html, "text/html");
}

// Keep what has not changed, so that nobody loses what they have typed.
function renew(old, fresh) {
  const known = new Map([...old.children].map((each) => [each.dataset.key, each]));
  for (const each of fresh.children) {
    const before = known.get(each.dataset.key);
    known.delete(each.dataset.key);
    if (before && before.dataset.version === each.dataset.version) {
      old.append(before);
    } else if (before?.contains(document.activeElement) && before.querySelector("form")) {
      old.append(before);
    } else {
      before?.remove();
      old.append(document.importNode(each, true));
    }
  }
  for (const gone of known.values()) {
    if (gone.contains(document.activeElement)) {
      settle(gone);
    } else {
      gone.remove();
    }
  }
}

function settle(card) {
  card.querySelector("form")?.replaceWith(Object.assign(document.createElement("p"), {
    className: "alarm", textContent: "This was settled elsewhere: nothing is left to answer here.",
  }));
}

async function refresh() {
  const parts = [...document.querySelectorAll("[data-live]")];
  if (!parts.length || loading) return;
  loading = true;
  try {
    const answer = await fetch(location.href, { credentials: "same-origin" });
    if (!answer.ok) return;
    const fresh = parse(await answer.text());
    for (const part of parts) {
      const found = fresh.querySelector(`[data-live="${part.dataset.live}"]`);
      if (found) renew(part, found);
    }
    document.title = fresh.title;
  } finally {
    loading = false;
  }
}

function beat(message) {
  const said = JSON.parse(message.data);
  const changed = document.getElementById("head").textContent !== (said.head || "no record");
  heard = Date.now();
  document.getElementById("time").textContent = said.time;
  document.getElementById("head").textContent = said.head || "no record";
  alive.classList.toggle("stale", Boolean(said.problem));
  if (changed || document.querySelector('[data-live="now"]')) refresh();
}

function look() {
  if (Date.now() - heard > STALE_MS) {
    alive.classList.add("stale");
    alive.dataset.lost = "yes";
  }
}

function bytes(base64) {
  return Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
}

// DSSE, version 1: https://github.com/secure-systems-lab/dsse/blob/master/protocol.md
async function checkReceipt(element) {
  const envelope = JSON.parse(element.dataset.envelope);
  const payload = bytes(envelope.payload);
  const kind = envelope.payloadType;
  const begin = new TextEncoder().encode(`DSSEv1 ${kind.length} ${kind} ${payload.length} `);
  const signed = new Uint8Array([...begin, ...payload]);
  let words = "The signature of its receipt does NOT fit: the receipt, or the log, was changed.";
  let fits = false;
  try {
    const key = await crypto.subtle.importKey("spki", bytes(element.dataset.key), "Ed25519", false, ["verify"]);
    fits = await crypto.subtle.verify("Ed25519", key, bytes(envelope.signatures[0].sig), signed);
    const about = JSON.parse(new TextDecoder().decode(payload)).predicate.call.id;
    if (fits && about === element.dataset.call) words = "Its receipt is signed, for this call.";
    else if (fits) fits = false, words = `Its receipt is of another call, ${about}.`;
  } catch (problem) {
    words = `Its receipt was not checked: ${problem.message}`;
  }
  element.textContent = words;
  element.className = fits ? "green" : "alarm";
}

if (alive) {
  localStorage.setItem("place", location.pathname.split("/")[1]);
  new EventSource(alive.dataset.events).onmessage = beat;
  setInterval(look, 1000);
}
const receipt = document.getElementById("receipt");
if (receipt) checkReceipt(receipt);
