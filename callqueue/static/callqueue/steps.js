/* An action in steps: its page goes on by itself, one request after the other. */
"use strict";

(function () {
  const form = document.querySelector("form[data-continue]");
  if (form) {
    form.requestSubmit();
  }
})();
