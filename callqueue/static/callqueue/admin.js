/* The dashboard's live parts, what a page fetches afterwards, and the button that copies. Works with a content security policy of 'self'. */
"use strict";

(function () {
  const board = document.querySelector("[data-live-url]");
  if (board) {
    follow(board, board.querySelector("[data-stale]"));
  }
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", () => copy(button));
  }

  for (const place of document.querySelectorAll("[data-fetch]")) {
    fill(place);
  }

  /* Where this fails, the link that was there before stays. */
  async function fill(place) {
    const answer = await fetch(place.dataset.fetch, { credentials: "same-origin", redirect: "error" });
    if (answer.ok) {
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      place.replaceChildren(...fresh.querySelector("p").childNodes);
    }
  }

  /* Fetches the parts that change, for as long as someone looks. */
  function follow(board, stale) {
    const every = Number(board.dataset.liveEvery);
    async function look() {
      if (!document.hidden) {
        try {
          const answer = await fetch(board.dataset.liveUrl, { credentials: "same-origin", redirect: "error" });
          if (!answer.ok) {
            throw new Error("status " + answer.status);
          }
          replace(board, await answer.text());
          stale.hidden = true;
        } catch (error) {
          stale.textContent = stale.dataset.stale;
          stale.hidden = false;
        }
      }
      setTimeout(look, every);
    }
    setTimeout(look, every);
  }

  function replace(board, text) {
    const fresh = new DOMParser().parseFromString(text, "text/html");
    for (const part of fresh.querySelectorAll("[data-live]")) {
      const place = [...board.querySelectorAll("[data-live]")].find((old) => old.dataset.live === part.dataset.live);
      if (!place || place.contains(document.activeElement)) {
        continue;
      }
      for (const open of place.querySelectorAll("details[open][data-keep]")) {
        for (const same of part.querySelectorAll("details[data-keep]")) {
          same.open = same.open || same.dataset.keep === open.dataset.keep;
        }
      }
      place.replaceChildren(...part.childNodes);
    }
  }

  async function copy(button) {
    const source = document.getElementById(button.dataset.copy);
    const told = button.parentElement.querySelector("[data-copied]");
    try {
      await navigator.clipboard.writeText(source.textContent);
      told.textContent = told.dataset.copied;
    } catch (error) {
      getSelection().selectAllChildren(source);
      told.textContent = told.dataset.selected;
    }
  }
})();
