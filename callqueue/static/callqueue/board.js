/* Fetches the page again and again, and puts its live parts in the places of the old ones. A part that is in use, or that is what it was, stays as it is. */
"use strict";

(function () {
  const page = document.querySelector("[data-live-every]");
  if (!page) {
    return;
  }
  const parts = [...page.querySelectorAll("[data-live]")];
  const said = new Map(parts.map((part) => [part, part.innerHTML]));
  setTimeout(look, page.dataset.liveEvery);

  async function look() {
    const fresh = document.hidden ? null : await load().catch(() => null);
    page.querySelector(".cq-stale").hidden = document.hidden || Boolean(fresh);
    if (fresh) {
      parts.forEach((part) => renew(part, fresh.querySelector(`[data-live="${part.dataset.live}"]`)));
    }
    if (!fresh || !fresh.querySelector("[data-live-over]")) {
      setTimeout(look, page.dataset.liveEvery);
    }
  }

  async function load() {
    const answer = await fetch(location.href, { redirect: "manual" });
    return answer.ok ? new DOMParser().parseFromString(await answer.text(), "text/html") : null;
  }

  function renew(part, fresh) {
    const focus = part.contains(document.activeElement) && document.activeElement !== part ? document.activeElement : null;
    const selection = getSelection();
    const isInUse = (focus && !focus.href) || (!selection.isCollapsed && selection.containsNode(part, true));
    if (!fresh || isInUse || fresh.innerHTML === said.get(part)) {
      return;
    }
    said.set(part, fresh.innerHTML);
    part.replaceChildren(...fresh.childNodes);
    [...part.querySelectorAll("a")].find((one) => focus && one.href === focus.href)?.focus({ preventScroll: true });
  }
})();
