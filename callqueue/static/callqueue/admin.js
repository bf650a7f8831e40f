/* The button that copies. Works with a content security policy of 'self'. */
"use strict";

(function () {
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", () => copy(button));
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
