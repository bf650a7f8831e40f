/* What a page fetches afterwards, and the button that copies. Works with a content security policy of 'self'. */
"use strict";

(function () {
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
