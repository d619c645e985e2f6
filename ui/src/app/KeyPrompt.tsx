// Asks for the API key. It stays in memory, unless the user chooses to have it stored until the tab is closed.
import { signal, useSignalEffect } from "@preact/signals";
import { useRef } from "preact/hooks";
import { showModal } from "./modal";
import { status, useKey } from "./session";

const isAsking = signal(false);

export function askForKey(): void {
  isAsking.value = true;
}

export function KeyPrompt() {
  const dialog = useRef<HTMLDialogElement>(null);
  const input = useRef<HTMLInputElement>(null);
  const choice = useRef<HTMLInputElement>(null);
  useSignalEffect(() => {
    if (status.value.kind === "key") isAsking.value = true;
  });
  useSignalEffect(() => {
    if (isAsking.value && dialog.current && !dialog.current.open) showModal(dialog.current);
    else if (!isAsking.value) dialog.current?.close();
  });
  const wasWrong = status.value.kind === "key" && status.value.wasWrong;
  return (
    <dialog ref={dialog} class="dialog" aria-labelledby="key-title" onClose={() => (isAsking.value = false)}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          const given = input.current!.value;
          input.current!.value = "";
          isAsking.value = false;
          void useKey(given, choice.current!.checked);
        }}
      >
        <h2 id="key-title">API key</h2>
        {wasWrong && (
          <p id="key-refusal" class="problem">
            The server does not accept that key.
          </p>
        )}
        <p id="key-note" class="hint">
          The key stays in this page's memory: it is gone when the page is closed, or reloaded without the choice below.
        </p>
        <label class="field">
          <span>Key</span>
          <input
            ref={input}
            type="password"
            autocomplete="off"
            spellcheck={false}
            required
            aria-describedby={wasWrong ? "key-refusal key-note" : "key-note"}
            data-testid="key-input"
          />
        </label>
        <label class="check">
          <input ref={choice} type="checkbox" data-testid="keep-key" />
          <span>Keep it for reloads, in the browser's storage, until this tab is closed</span>
        </label>
        <div class="row end">
          <button type="button" class="quiet" onClick={() => (isAsking.value = false)}>
            Cancel
          </button>
          <button type="submit" class="primary">
            Connect
          </button>
        </div>
      </form>
    </dialog>
  );
}
