// Parser of the part of PTX that the compiler generates for the kernels (PTX ISA 9).
#include "program.h"

#include <algorithm>
#include <cctype>
#include <set>

#include "text.h"

namespace interpreter {

namespace {

int bytes_of_class(char letter) { return letter == 'h' ? 2 : letter == 'w' ? 4 : letter == 'x' ? 8 : kBitsOfLanes; }

// Returns the bytes of a lane for a declared type, and 0 for predicates.
int bytes_of_type(std::string_view type) {
  if (type == ".pred") return 0;
  return std::stoi(std::string(type.substr(2))) / 8;
}

// Returns whether the operand is a register of 32 bits, or a vector of 32-bit registers.
bool is_word(std::string_view text) {
  if (text[0] == '{') text = text.substr(1);
  return text.starts_with("%r") && std::isdigit(static_cast<unsigned char>(text[2]));
}

// Returns the form of an opcode with variants determined by the operands.
const char* form_of(std::string_view name, const std::vector<std::string_view>& parts) {
  if (name.starts_with("mov.") && parts[0][0] == '{') return " unpack";
  if (name.starts_with("mov.") && parts[1][0] == '{') return " pack";
  if (name.starts_with("wgmma.mma") && parts[1][0] == '{') return " registers";
  // Registers may be wider than the numbers: 8 bits in 16 or 32, 16 bits in 32, and 32 bits in 64.
  if (name.starts_with("cvt.") && name.ends_with("32") && parts[1].starts_with("%rd")) return " wide";
  if (name.ends_with("8")) {
    if (name.starts_with("ld.") && is_word(parts[0])) return " word";
    if ((name.starts_with("cvt.") || name.starts_with("st.")) && is_word(parts[1])) return " word";
  }
  if (name.ends_with("16")) {
    if (name.starts_with("ld.") && is_word(parts[0])) return " word";
    if (name.starts_with("st.") && is_word(parts[1])) return " word";
  }
  if (name.starts_with("bar") && !name.starts_with("bar.warp") && parts.size() == 2) return " 2";
  return "";
}

constexpr std::pair<const char*, Special> kSpecials[] = {
    {"%tid.x", Special::kTidX},       {"%ctaid.x", Special::kCtaidX},   {"%ctaid.y", Special::kCtaidY},
    {"%ctaid.z", Special::kCtaidZ},   {"%nctaid.x", Special::kNctaidX}, {"%nctaid.y", Special::kNctaidY},
    {"%nctaid.z", Special::kNctaidZ}, {"%laneid", Special::kLaneid},    {"%cluster_ctarank", Special::kClusterCtarank},
};

// Body of a kernel. Names in a block in braces hide the names around the block.
class Body {
 public:
  Body(Kernel& kernel, const std::map<std::string, size_t, std::less<>>& parameters)
      : kernel_(kernel), parameters_(parameters) {}

  void open() { scopes_.push_back(next_scope_++); }
  void close() { scopes_.pop_back(); }
  bool empty() const { return scopes_.empty(); }

  void label(std::string_view name) { labels_[scoped(name)] = static_cast<uint32_t>(kernel_.code.size()); }

  // .reg .b32 %r<20>; or a single name.
  void declare(std::string_view type, std::string_view name) {
    const int bytes = bytes_of_type(type);
    if (const size_t angle = name.find('<'); angle != std::string_view::npos) {
      const int count = std::stoi(std::string(name.substr(angle + 1)));
      for (int i = 0; i < count; ++i) add(std::string(name.substr(0, angle)) + std::to_string(i), bytes);
    } else {
      add(scoped(name), bytes);
    }
  }

  void instruction(std::string_view text, int line) {
    Instruction parsed;
    parsed.line = line;
    if (text[0] == '@') {
      const size_t space = text.find_first_of(" \t");
      parsed.guard_not = text[1] == '!';
      parsed.guard = predicate_of(text.substr(parsed.guard_not ? 2 : 1, space - (parsed.guard_not ? 2 : 1)), line);
      text = trimmed(text.substr(space));
    }
    const size_t space = text.find_first_of(" \t\n");
    const std::string_view name = text.substr(0, space);
    std::vector<std::string_view> parts;
    if (space != std::string_view::npos) parts = split(text.substr(space), ",|");
    const Opcode* opcode = find_opcode(name, form_of(name, parts));
    if (opcode == nullptr) fail(line, "no opcode " + std::string(name));
    parsed.run = opcode->run;
    parsed.extra = opcode->extra;
    parsed.opcode = names_.insert(std::string(name)).first->c_str();
    const std::string_view letters = opcode->operands;
    if (parts.size() != letters.size()) fail(line, "operands of " + std::string(text));
    for (size_t i = 0, place = 0; i < parts.size(); ++i) operand(parsed, place, letters[i], parts[i], line);
    kernel_.code.push_back(std::move(parsed));
  }

  void finish() {
    for (const auto& [index, names, line] : jumps_) {
      const auto name = std::find_if(names.begin(), names.end(), [&](const auto& x) { return labels_.contains(x); });
      if (name == names.end()) fail(line, "no label " + names.back());
      kernel_.code[index].target = labels_.at(*name);
    }
  }

 private:
  struct Register {
    int32_t at, bytes;  // bytes of a lane; 0 for a predicate
  };
  struct Jump {
    size_t instruction;
    std::vector<std::string> names;  // innermost first
    int line;
  };

  void operand(Instruction& parsed, size_t& place, char letter, std::string_view text, int line) {
    if (place >= kMostOperands) fail(line, "too many operands");
    Operand& to = parsed.operands[place];
    switch (letter) {
      case 'h':
      case 'w':
      case 'x':
        to.at = value(text, bytes_of_class(letter), line);
        break;
      case 'p':
        to.at = text == "_" ? scratch() : is_number(text) ? truth(number_of(text) != 0) : predicate_of(text, line);
        break;
      case 'V':
      case 'H':
      case 'X': {
        to.number = static_cast<int64_t>(parsed.many.size());
        const bool is_single = text[0] != '{';
        for (const auto part : is_single ? std::vector{text} : split(text.substr(1, text.size() - 2), ","))
          parsed.many.push_back(value(part, letter == 'H' ? 2 : letter == 'V' ? 4 : 8, line));
        to.at = static_cast<int32_t>(parsed.many.size() - to.number);
        break;
      }
      case 'S':
        address(to, text, 4, line);
        break;
      case 'G':
      case 'P':
        address(to, text, 8, line);
        break;
      case 'T': {
        const auto parts = split(text.substr(1, text.size() - 2), ",");
        to.at = value(parts[0], 8, line);
        to.number = static_cast<int64_t>(parsed.many.size());
        for (const auto part : split(parts[1].substr(1, parts[1].size() - 2), ","))
          parsed.many.push_back(value(part, 4, line));
        break;
      }
      case 'I':
        to.number = static_cast<int64_t>(number_of(text));
        break;
      case 'L': {
        std::vector<std::string> names;
        for (size_t depth = scopes_.size(); depth > 0; --depth) names.push_back(scoped(text, depth));
        jumps_.push_back({kernel_.code.size(), std::move(names), line});
        break;
      }
      default:
        fail(line, "letter");
    }
    ++place;
  }

  // Addresses have the forms [register], [register+12], [name+-4].
  void address(Operand& to, std::string_view text, int bytes, int line) {
    if (text[0] != '[') fail(line, "address " + std::string(text));
    text = text.substr(1, text.size() - 2);
    const size_t plus = text.find('+');
    if (plus != std::string_view::npos) to.number = static_cast<int64_t>(number_of(trimmed(text.substr(plus + 1))));
    to.at = value(trimmed(text.substr(0, plus)), bytes, line);
  }

  int32_t value(std::string_view text, int bytes, int line) {
    if (text == "_") return scratch();
    if (is_number(text)) return constant({Constant::kNumber, number_of(text), bytes, 0});
    for (const auto& [name, special] : kSpecials)
      if (text == name) return constant({Constant::kSpecial, static_cast<uint64_t>(special), bytes, 0});
    if (const auto entry = parameters_.find(text); entry != parameters_.end())
      return constant({Constant::kParameter, entry->second, bytes, 0});
    if (text.starts_with("__dynamic_shmem__")) return constant({Constant::kShared, 0, bytes, 0});
    const Register& reg = find(text, line);
    if (reg.bytes != bytes) fail(line, "register " + std::string(text) + " is of another width");
    return reg.at;
  }

  // A predicate with the same value in all lanes.
  int32_t truth(bool value) { return constant({Constant::kNumber, value ? 0xffffffff : 0, 0, 0}); }

  int32_t constant(Constant entry) {
    if (entry.kind == Constant::kNumber && entry.bytes != 0 && entry.bytes < 8)
      entry.number &= (uint64_t{1} << 8 * entry.bytes) - 1;
    if (const auto existing = constants_.find(entry); existing != constants_.end()) return existing->at;
    entry.at = room(room_of(entry.bytes));
    constants_.insert(entry);
    kernel_.constants.push_back(entry);
    return entry.at;
  }

  int32_t predicate_of(std::string_view name, int line) {
    const Register& reg = find(name, line);
    if (reg.bytes != 0) fail(line, std::string(name) + " is no predicate");
    return reg.at;
  }

  const Register& find(std::string_view name, int line) {
    for (size_t depth = scopes_.size(); depth > 0; --depth)
      if (const auto entry = registers_.find(scoped(name, depth)); entry != registers_.end()) return entry->second;
    if (const auto entry = registers_.find(name); entry != registers_.end()) return entry->second;
    fail(line, "no register " + std::string(name));
  }

  std::string scoped(std::string_view name) const { return scoped(name, scopes_.size()); }
  std::string scoped(std::string_view name, size_t depth) const {
    return std::string(name) + "#" + std::to_string(scopes_[depth - 1]);
  }

  void add(const std::string& name, int bytes) { registers_[name] = {room(room_of(bytes)), bytes}; }
  static int room_of(int bytes) { return bytes == 0 ? kBitsOfLanes : bytes * kLanes; }
  int32_t scratch() { return room(8 * kLanes); }
  int32_t room(int bytes) {
    const size_t at = (kernel_.register_bytes + bytes - 1) / bytes * bytes;
    kernel_.register_bytes = at + bytes;
    return static_cast<int32_t>(at);
  }

  static std::set<std::string> names_;
  Kernel& kernel_;
  const std::map<std::string, size_t, std::less<>>& parameters_;
  std::vector<int> scopes_;
  int next_scope_ = 0;
  std::map<std::string, Register, std::less<>> registers_;
  std::map<std::string, uint32_t> labels_;
  std::set<Constant> constants_;
  std::vector<Jump> jumps_;
};

std::set<std::string> Body::names_;

size_t round_up(size_t x, size_t unit) { return (x + unit - 1) / unit * unit; }

// Forms: .param .align 64 .b8 name[128]   .param .f32 name   .param .u64 .ptr .global .align 16 name
void parameter(Kernel& kernel, std::string_view text, std::map<std::string, size_t, std::less<>>& names) {
  const auto words = split(text, " \t\n");
  size_t align = 0, bytes = 0;
  for (size_t i = 0; i + 1 < words.size(); ++i) {
    const std::string_view word = words[i];
    if (word == ".align" && words[i - 1] != ".global") align = std::stoul(std::string(words[i + 1]));
    if (word.size() >= 3 && word[0] == '.' && std::isdigit(static_cast<unsigned char>(word[2])))
      bytes = bytes_of_type(word);
  }
  std::string_view name = words.back();
  if (align == 0) align = bytes;
  if (const size_t bracket = name.find('['); bracket != std::string_view::npos) {
    bytes *= std::stoul(std::string(name.substr(bracket + 1)));
    name = name.substr(0, bracket);
  }
  const size_t offset = round_up(kernel.parameter_bytes, align);
  kernel.parameter_bytes = offset + bytes;
  kernel.parameters.push_back({offset, bytes});
  names[std::string(name)] = offset;
}

bool is_label(std::string_view text) {
  const size_t end = text.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_$");
  return end != 0 && end != std::string_view::npos && text[end] == ':' && text.substr(end, 2) != "::";
}

void body(Reader& reader, Kernel& kernel, const std::map<std::string, size_t, std::less<>>& parameters) {
  Body body(kernel, parameters);
  do {
    const char next = reader.peek();
    if (next == '{') {
      reader.take('{');
      body.open();
    } else if (next == '}') {
      reader.take('}');
      body.close();
    } else if (next == ';') {
      reader.take(';');
    } else if (is_label(reader.ahead(200))) {
      body.label(reader.until(":"));
      reader.take(':');
    } else if (next == '.') {
      const auto words = split(reader.statement(), " \t\n");
      if (words[0] == ".reg") body.declare(words[1], words[2]);
    } else {
      const int line = reader.line();
      body.instruction(reader.statement(), line);
    }
  } while (!body.empty());
  body.finish();
}

}  // namespace

std::map<std::string, Kernel> parse(std::string_view text) {
  std::map<std::string, Kernel> kernels;
  Reader reader(text);
  while (!reader.done()) {
    if (!reader.ahead(40).starts_with(".visible .entry")) {
      reader.until("\n");
      continue;
    }
    const auto words = split(reader.until("("), " \t");
    Kernel& kernel = kernels[std::string(words.back())];
    kernel.name = words.back();
    std::map<std::string, size_t, std::less<>> parameters;
    reader.take('(');
    for (const auto text : split(reader.until(")"), ",")) parameter(kernel, text, parameters);
    reader.take(')');
    reader.until("{");
    body(reader, kernel, parameters);
  }
  return kernels;
}

}  // namespace interpreter
