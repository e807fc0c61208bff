#include "text.h"

#include <cctype>
#include <stdexcept>

namespace interpreter {

void fail(int line, const std::string& message) {
  throw std::runtime_error("PTX line " + std::to_string(line) + ": " + message);
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front()))) text.remove_prefix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back()))) text.remove_suffix(1);
  return text;
}

std::vector<std::string_view> split(std::string_view text, std::string_view separators) {
  std::vector<std::string_view> parts;
  int depth = 0;
  size_t from = 0;
  for (size_t i = 0; i <= text.size(); ++i) {
    if (i < text.size()) {
      depth += text[i] == '{' || text[i] == '[';
      depth -= text[i] == '}' || text[i] == ']';
    }
    if (i == text.size() || (depth == 0 && separators.find(text[i]) != std::string_view::npos)) {
      if (const auto part = trimmed(text.substr(from, i - from)); !part.empty()) parts.push_back(part);
      from = i + 1;
    }
  }
  return parts;
}

bool is_number(std::string_view text) {
  return std::isdigit(static_cast<unsigned char>(text[0])) || (text[0] == '-' && text.size() > 1);
}

uint64_t number_of(std::string_view text) {
  const std::string copy(text);
  if (copy.starts_with("0f") || copy.starts_with("0d")) return std::stoull(copy.substr(2), nullptr, 16);
  if (copy.ends_with('U')) return std::stoull(copy, nullptr, 0);
  return copy[0] == '-' ? static_cast<uint64_t>(std::stoll(copy, nullptr, 0)) : std::stoull(copy, nullptr, 0);
}

Reader::Reader(std::string_view text) : text_(text) {}

bool Reader::done() {
  skip();
  return at_ >= text_.size();
}

char Reader::peek() {
  skip();
  return at_ < text_.size() ? text_[at_] : '\0';
}

void Reader::take(char c) {
  if (peek() != c) fail(line_, std::string("expected ") + c);
  ++at_;
}

std::string_view Reader::until(std::string_view ends) {
  skip();
  const size_t from = at_;
  at_ = std::min(text_.find_first_of(ends, at_), text_.size());
  for (size_t i = from; i < at_; ++i) line_ += text_[i] == '\n';
  return trimmed(text_.substr(from, at_ - from));
}

std::string_view Reader::statement() {
  const auto text = until(";");
  take(';');
  return text;
}

std::string_view Reader::ahead(size_t count) {
  skip();
  return text_.substr(at_, count);
}

void Reader::skip() {
  while (at_ < text_.size()) {
    if (text_[at_] == '\n') ++line_;
    if (std::isspace(static_cast<unsigned char>(text_[at_]))) {
      ++at_;
    } else if (text_.substr(at_, 2) == "//") {
      at_ = std::min(text_.find('\n', at_), text_.size());
    } else {
      return;
    }
  }
}

}  // namespace interpreter
