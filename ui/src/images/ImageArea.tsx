// Pictures around a text field: they are dropped on it, pasted into it, or chosen, and removed again.
import { useSignal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { announce } from "../app/announce";
import { sentenceOf, session } from "../app/session";
import { closeField, holdForField } from "./kept";
import { readPicture, type ShownImage } from "./picture";
import { blindness } from "./sight";
import { Thumbnails } from "./Thumbnails";
import "./images.css";

const MAX_IMAGES = 16;

interface Props {
  /** Whose pictures they are, for labels: "Message". */
  label: string;
  images: readonly ShownImage[];
  onChange: (images: readonly ShownImage[]) => void;
  isOff?: boolean;
  /** Files that are dropped anywhere on the page are for this field. */
  isPageWide?: boolean;
  children: ComponentChildren;
  /** What stands at the end of the row with the button. */
  actions?: ComponentChildren;
}

export function ImageArea({ label, images, onChange, isOff = false, isPageWide = false, children, actions }: Props) {
  const picker = useRef<HTMLInputElement>(null);
  const button = useRef<HTMLButtonElement>(null);
  const area = useRef<HTMLDivElement>(null);
  const problem = useSignal("");
  const numPending = useSignal(0);
  const isOver = useSignal(false);
  // Reading takes a while, in which the rest of the form may change.
  const latest = useRef({ images, onChange });
  latest.current = { images, onChange };
  const blind = blindness(session.value);

  function change(to: readonly ShownImage[]): void {
    latest.current.images = to;
    latest.current.onChange(to);
  }

  async function add(files: readonly File[]): Promise<void> {
    problem.value = blind ?? "";
    if (blind !== null) announce(blind);
    if (isOff || blind !== null) return;
    const problems = new Set<string>();
    for (const file of files) {
      numPending.value++;
      try {
        const [shown, made] = await readPicture(file);
        const before = latest.current.images;
        if (before.some(({ source }) => source === shown.source)) continue;
        if (before.length >= MAX_IMAGES) throw new Error(`A turn has at most ${MAX_IMAGES} images.`);
        holdForField(made, area);
        change([...before, shown]);
        announce(`Added ${shown.name}.`);
      } catch (error) {
        const sentence = sentenceOf(error);
        announce(sentence);
        problem.value = [...problems.add(sentence)].slice(0, MAX_IMAGES).join(" ");
      } finally {
        numPending.value--;
      }
    }
  }

  const adding = useRef(add);
  adding.current = add;
  useEffect(() => {
    const target: HTMLElement | Document = isPageWide ? document : area.current!;
    const over = (event: Event): void => {
      isOver.value = hasFiles((event as DragEvent).dataTransfer) && !event.defaultPrevented;
      if (isOver.value) event.preventDefault();
    };
    const leave = (event: Event): void => {
      const to = (event as DragEvent).relatedTarget as Node | null;
      if (to === null || !target.contains(to)) isOver.value = false;
    };
    const drop = (event: Event): void => {
      isOver.value = false;
      if (!hasFiles((event as DragEvent).dataTransfer) || event.defaultPrevented) return;
      event.preventDefault();
      void adding.current([...(event as DragEvent).dataTransfer!.files]);
    };
    const listeners = { dragover: over, dragleave: leave, drop };
    for (const [name, listener] of Object.entries(listeners)) target.addEventListener(name, listener);
    return () => {
      for (const [name, listener] of Object.entries(listeners)) target.removeEventListener(name, listener);
    };
  }, [isPageWide]);
  useEffect(() => () => closeField(area), []);
  // A problem is of the last attempt: it goes with what is sent, and with the model.
  useEffect(() => {
    if (images.length === 0) problem.value = "";
  }, [images.length, session.value]);

  const shownProblem = problem.value || (images.length > 0 ? (blind ?? "") : "");
  return (
    <div
      ref={area}
      class={`image-area${isOver.value ? " is-over" : ""}`}
      onInput={() => (problem.value = "")}
      onPaste={(event) => {
        const files = imagesIn(event.clipboardData);
        if (files.length === 0 || isOff) return;
        event.preventDefault();
        void add(files);
      }}
    >
      {children}
      <Thumbnails
        label={`Images of ${label}`}
        images={images}
        isNoted
        {...(isOff
          ? {}
          : {
              onRemove: (gone: ShownImage) => {
                change(latest.current.images.filter(({ source }) => source !== gone.source));
                problem.value = "";
                announce(`Removed ${gone.name}.`);
                button.current?.focus();
              },
            })}
      />
      {shownProblem && (
        <p class="image-problem" data-testid="image-problem">
          {shownProblem}
        </p>
      )}
      <div class="row image-row">
        <input
          ref={picker}
          hidden
          type="file"
          accept="image/*"
          multiple
          data-testid="image-files"
          onChange={(event) => {
            void add([...(event.currentTarget.files ?? [])]);
            event.currentTarget.value = "";
          }}
        />
        <button
          ref={button}
          type="button"
          class="quiet small flush"
          disabled={isOff}
          title="Drop or paste one here, or choose a file"
          onClick={() => {
            problem.value = blind ?? "";
            if (blind === null) picker.current?.click();
            else announce(blind);
          }}
        >
          Add image
        </button>
        {numPending.value > 0 && <span class="hint">Reading…</span>}
        {actions && <div class="row end image-actions">{actions}</div>}
      </div>
    </div>
  );
}

function hasFiles(data: DataTransfer | null): boolean {
  return data?.types.includes("Files") === true;
}

/** The pictures of a paste. With text beside them, as from a word processor, the text is meant. */
function imagesIn(data: DataTransfer | null): File[] {
  if (!data || data.types.includes("text/plain")) return [];
  return [...data.files].filter(({ type }) => type.startsWith("image/"));
}
