// A kill button on every process but the gateway: it asks first.

import { ask, setAdminKey } from "./api.js";

const EFFECTS = {
  orchestrator: "Tokens do not need it. The next one takes over what it finds.",
  anchor: "It owns shared memory, which stays good for those who use it. The next one is handed everything.",
  zygote: "Workers are forked from it. The next one is started.",
};

export class KillDialog {
  constructor() {
    this.dialog = document.getElementById("kill");
    this.title = document.getElementById("kill-title");
    this.text = document.getElementById("kill-text");
    this.error = document.getElementById("kill-error");
    this.key = document.getElementById("kill-key"); // shown once the server has asked for an admin key
    this.subject = null;
    for (const button of this.dialog.querySelectorAll("button")) button.addEventListener("click", () => this.#choose(button.dataset.signal));
  }

  open(subject, name, pid) {
    this.subject = subject;
    this.title.textContent = `Kill ${subject.process ? "the " : ""}${name}?`;
    const isExpert = name.startsWith("expert");
    const worker = isExpert ? "Its experts go on in their shadows; a new process takes its seat." : "Its streams go on elsewhere, from its KV log; a new process takes its seat.";
    this.text.textContent = `pid ${pid}. ${EFFECTS[subject.process] ?? worker}`;
    this.error.textContent = "";
    this.dialog.showModal();
    this.dialog.querySelector("button").focus();
  }

  async #choose(signal) {
    if (signal) {
      if (this.key.value) setAdminKey(this.key.value.trim());
      try {
        await ask("cluster/fault", { body: { ...this.subject, signal }, isAdmin: true });
      } catch (error) {
        this.error.textContent = error.message;
        if (error.status === 401 || error.status === 403) this.key.hidden = false;
        return;
      }
    }
    this.dialog.close();
  }
}
