"use strict";
// What changes while a page is open: its live parts, the sign of life, and the check of a receipt.

const STALE_MS = 5000;
// Not every browser has Trusted Types.
const policy = globalThis.trustedTypes?.createPolicy("glovebox", { createHTML: (html) => html });
const alive = document.getElementById("alive");
const parts = [...document.querySelectorAll("[data-live]")];
let heard = Date.now();
let loading = false;
let problem = false;

// The server has escaped all text in its pages; nothing else comes through here.
function parse(html) {
  return new DOMParser().parseFromString(policy ? policy.createHTML(html) : html, "text/html");
}

// Keep what has not changed, where it is, so that nobody loses what they have typed, or their place.
function renew(old, fresh) {
  const focused = document.activeElement;
  const known = new Map([...old.children].map((each) => [each.dataset.key, each]));
  const wanted = [...fresh.children].map((each) => {
    const before = known.get(each.dataset.key);
    const stays = before && (before.dataset.version === each.dataset.version || inUse(before));
    if (stays) known.delete(each.dataset.key);
    return stays ? before : document.importNode(each, true);
  });
  for (const gone of known.values()) {
    if (inUse(gone)) settle(gone);
    else gone.remove();
  }
  let at = old.firstElementChild;
  for (const each of wanted) {
    while (at && !wanted.includes(at)) at = at.nextElementSibling;
    if (each === at) at = at.nextElementSibling;
    else old.insertBefore(each, at);
  }
  if (old.contains(focused)) focused.focus({ preventScroll: true });
}

function inUse(card) {
  const changed = (each) => each.checked !== each.defaultChecked || each.value !== each.defaultValue;
  return card.contains(document.activeElement) || card.dataset.over || [...card.querySelectorAll("input")].some(changed);
}

function settle(card) {
  if (card.querySelector(".alarm")) return;
  const form = card.querySelector("form");
  const words = "This was settled elsewhere, or has ended: nothing is left to answer here.";
  card.append(Object.assign(document.createElement("p"), { className: "alarm", role: "alert", textContent: words }));
  if (form) card.dataset.over = "yes";
  form?.remove();
}

async function refresh() {
  if (loading) return;
  loading = true;
  try {
    const answer = await fetch(location.href, { credentials: "same-origin", signal: AbortSignal.timeout(STALE_MS) });
    if (!answer.ok) return;
    const fresh = parse(await answer.text());
    for (const part of parts) {
      const found = fresh.querySelector(`[data-live="${part.dataset.live}"]`);
      if (found) renew(part, found);
    }
    document.title = fresh.title;
    hear(fresh.getElementById("time").textContent, fresh.getElementById("head").textContent);
  } finally {
    loading = false;
  }
}

// A page with live parts is as old as they are.
function beat(message) {
  const said = JSON.parse(message.data);
  problem = Boolean(said.problem);
  if (parts.length) refresh();
  else hear(said.time, said.head || "no record");
}

function hear(time, head) {
  heard = Date.now();
  document.getElementById("time").textContent = time;
  document.getElementById("head").textContent = head;
  look();
}

function look() {
  alive.classList.toggle("stale", problem || Date.now() - heard > STALE_MS);
}

function bytes(base64) {
  return Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
}

// DSSE, version 1: https://github.com/secure-systems-lab/dsse/blob/master/protocol.md
async function checkReceipt(element) {
  let words = "The signature of its receipt does NOT fit: the receipt, or the log, was changed.";
  let fits = false;
  try {
    const envelope = JSON.parse(element.dataset.envelope);
    const payload = bytes(envelope.payload);
    const kind = envelope.payloadType;
    const begin = new TextEncoder().encode(`DSSEv1 ${kind.length} ${kind} ${payload.length} `);
    const signed = new Uint8Array([...begin, ...payload]);
    const key = await crypto.subtle.importKey("spki", bytes(element.dataset.key), "Ed25519", false, ["verify"]);
    if (envelope.signatures[0].keyid !== element.dataset.id) {
      words = "Its receipt was not checked: this server has another key now than then.";
    } else if (await crypto.subtle.verify("Ed25519", key, bytes(envelope.signatures[0].sig), signed)) {
      const about = JSON.parse(new TextDecoder().decode(payload)).predicate.call.id;
      fits = about === element.dataset.call;
      words = fits ? "Its receipt is signed, for this call." : `Its receipt is of another call, ${about}.`;
    }
  } catch (problem) {
    words = `Its receipt was not checked: ${problem.message}`;
  }
  element.textContent = words;
  element.className = fits ? "green" : "alarm";
}

if (alive) {
  new EventSource(alive.dataset.events).onmessage = beat;
  setInterval(look, 1000);
}
const receipt = document.getElementById("receipt");
if (receipt) checkReceipt(receipt);
// Last: a browser that keeps nothing refuses this.
if (alive) localStorage.setItem("place", location.pathname.split("/")[1]);
