// A modal dialog: Escape closes it, and the focus returns to where it was.
import type { ComponentChildren } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import { showModal } from "./modal";

export function Dialog(props: {
  title: string;
  className?: string;
  isOpen: boolean;
  onClose: () => void;
  children: ComponentChildren;
}) {
  const dialog = useRef<HTMLDialogElement>(null);
  useLayoutEffect(() => {
    if (props.isOpen && dialog.current && !dialog.current.open) showModal(dialog.current);
    else if (!props.isOpen) dialog.current?.close();
  }, [props.isOpen]);
  return (
    <dialog ref={dialog} class={`dialog ${props.className ?? ""}`} aria-label={props.title} onClose={props.onClose}>
      {props.isOpen && (
        <>
          <header class="dialog-head">
            <h2>{props.title}</h2>
            <button type="button" class="quiet" onClick={props.onClose}>
              Close
            </button>
          </header>
          {props.children}
        </>
      )}
    </dialog>
  );
}
