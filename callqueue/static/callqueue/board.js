/* The live parts of the dashboard, and of the pages of a rule and of a call that is not over. What has the focus keeps it, what is open stays open, what is scrolled stays where it is, and what is selected is not taken away. */
"use strict";

(function () {
  const board = document.querySelector("[data-live-url]");
  if (!board) {
    return;
  }
  const stale = board.querySelector("[data-stale]");
  const every = Number(board.dataset.liveEvery);

  async function look() {
    if (!document.hidden) {
      try {
        const answer = await fetch(board.dataset.liveUrl, { credentials: "same-origin", redirect: "manual" });
        if (answer.type === "opaqueredirect" || answer.status === 403) {
          ended();
          return;
        }
        if (!answer.ok) {
          throw new Error("status " + answer.status);
        }
        stale.hidden = true;
        if (replace(await answer.text())) {
          return;
        }
      } catch (error) {
        stale.textContent = stale.dataset.stale;
        stale.hidden = false;
      }
    }
    setTimeout(look, every);
  }
  setTimeout(look, every);

  /* The session is over: nothing here is new any more, and the way back is a link. */
  function ended() {
    const link = document.createElement("a");
    link.href = location.href;
    link.textContent = stale.dataset.login;
    stale.replaceChildren(stale.dataset.ended + " ", link);
    stale.hidden = false;
  }

  /* Puts the parts of a page in their places; whether it is over, so that no more will come. */
  function replace(text) {
    const fresh = new DOMParser().parseFromString(text, "text/html");
    const selection = getSelection();
    for (const part of fresh.querySelectorAll("[data-live]")) {
      const place = [...board.querySelectorAll("[data-live]")].find((old) => old.dataset.live === part.dataset.live);
      if (!place || part.hasAttribute("data-live-kept") || (!selection.isCollapsed && selection.containsNode(place, true))) {
        continue;
      }
      for (const old of place.querySelectorAll("details[data-keep]")) {
        for (const same of part.querySelectorAll("details[data-keep]")) {
          same.open = same.dataset.keep === old.dataset.keep ? old.open : same.open;
        }
      }
      const focused = place.contains(document.activeElement) && document.activeElement !== place ? nameOf(document.activeElement) : "";
      const scrolled = [...place.querySelectorAll(".cq-scroll")].map((one) => one.scrollLeft);
      place.replaceChildren(...part.childNodes);
      [...place.querySelectorAll(".cq-scroll")].forEach((one, i) => { one.scrollLeft = scrolled[i] || 0; });
      if (focused) {
        const same = [...place.querySelectorAll("a, summary, button, [tabindex]")].find((one) => nameOf(one) === focused);
        if (same) {
          same.focus({ preventScroll: true });
        }
      }
    }
    return Boolean(fresh.querySelector("[data-live-over]"));
  }

  /* What tells an element from others, in the part and in its successor. */
  function nameOf(one) {
    const details = one.closest("details[data-keep]");
    return one.tagName + " " + (one.getAttribute("href") || (details && details.dataset.keep) || one.getAttribute("aria-label") || one.textContent);
  }
})();
