// What a reasoning model thought before a reply: open while it thinks, closed once the reply begins.
import type { Variable } from "agentflow-client";
import { useSignal, useSignalEffect } from "@preact/signals";
import { useRef } from "preact/hooks";
import { useFollowEnd } from "../text/follow";

/** Of a reply that streams. `hasText` tells whether the reply has begun. */
export function StreamingReasoning({ variable, hasText }: { variable: Variable; hasText: () => boolean }) {
  const text = useSignal("");
  const isThinking = useSignal(true);
  useSignalEffect(() =>
    variable.onChange(() => {
      text.value = variable.reasoning;
      isThinking.value = !hasText() && !variable.done;
    }),
  );
  return <Reasoning text={text.value} isThinking={isThinking.value} />;
}

/** `numTokens`: none if they are not known yet. */
export function Reasoning(props: { text: string; isThinking?: boolean; numTokens?: number | undefined }) {
  const { text, isThinking, numTokens } = props;
  if (!text) return null;
  return (
    // Mounted anew when thinking ends, so that it closes once and then stays as the reader leaves it.
    <details key={String(isThinking === true)} class="reasoning" open={isThinking === true} data-testid="reasoning">
      <summary>
        {isThinking
          ? "Thinking…"
          : numTokens
            ? `Thought for ${numTokens.toLocaleString("en")} ${numTokens === 1 ? "token" : "tokens"}`
            : "Reasoning"}
      </summary>
      <ReasoningText text={text} isThinking={isThinking === true} />
    </details>
  );
}

function ReasoningText({ text, isThinking }: { text: string; isThinking: boolean }) {
  const box = useRef<HTMLDivElement>(null);
  const content = useRef<HTMLParagraphElement>(null);
  useFollowEnd(content, box, () => isThinking);
  return (
    <div ref={box} class="reasoning-text" tabIndex={0} role="region" aria-label="Reasoning">
      <p ref={content} class="model-text" dir="auto">
        {text}
      </p>
    </div>
  );
}
