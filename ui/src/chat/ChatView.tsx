import { View } from "../app/View";

export default function ChatView() {
  return (
    <View name="chat" title="Chat">
      <p class="empty">Nothing here yet.</p>
    </View>
  );
}
