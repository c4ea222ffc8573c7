#include "planes/block_packer.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "planes/coded_bytes.hpp"
#include "planes/quads.hpp"

namespace dsh {
namespace {

constexpr std::uint8_t version = 1;
constexpr std::size_t size_bytes = sizeof(std::uint64_t);
constexpr std::size_t head_bytes = 3 + size_bytes;
constexpr std::size_t row_bytes = 1 + size_bytes;
constexpr std::uint8_t indexed_form = 5; // in the place of the transform
constexpr std::size_t quads_head_bytes = 2 * row_bytes + size_bytes;

constexpr std::size_t sample_parts = 4;
constexpr std::size_t sample_part_elements = 1024;

// A plane that coding makes hardly smaller is stored: that costs little room, and decoding it nothing.
constexpr double worth_coding = 0.97;
// Repetitions take long to find, and a sample has some by chance.
constexpr double worth_matches = 0.97;
// Quads take a fourth of a plane at least before they are coded: they are tried only where frames take little.
constexpr double may_be_quads = 0.5;
constexpr double worth_quads = 0.95;
// What is indexed takes a little longer to read; but bfloat16 numbers are indexed faster than they are coded otherwise.
constexpr double worth_indexing = 0.9;
constexpr double worth_indexing_halves = 1.01;
constexpr std::size_t least_indexed = 1024;

std::byte *put_size(std::byte *into, std::uint64_t size) {
    std::memcpy(into, &size, size_bytes); // the processor is little-endian
    return into + size_bytes;
}

template <typename Coding> std::byte *put_row(std::byte *into, Coding coding, std::size_t nbytes) {
    *into = static_cast<std::byte>(coding);
    return put_size(into + 1, nbytes);
}

std::byte *put_bytes(std::byte *into, std::span<const std::byte> bytes) {
    if (!bytes.empty()) {
        std::memcpy(into, bytes.data(), bytes.size());
    }
    return into + bytes.size();
}

bool is_whole(std::span<const std::byte> sample, std::span<const std::byte> data) {
    return sample.size() == data.size();
}

bool is_below(std::size_t size, double share, std::size_t other) {
    return static_cast<double>(size) < share * static_cast<double>(other);
}

} // namespace

std::size_t most_packed_bytes(const RawBlock &block) {
    return head_bytes + block.itemsize * row_bytes + block.bytes.size();
}

std::size_t BlockPacker::pack(const RawBlock &block, const std::byte *base, std::span<const Transform> transforms,
                              bool may_index) {
    require_itemsize(block.itemsize);
    if (transforms.empty()) {
        throw std::invalid_argument("transforms is empty: a block has one");
    }
    block_ = block;
    const std::size_t itemsize = block.itemsize;
    const auto whole = block.bytes.first(block.bytes.size() - block.bytes.size() % itemsize);
    const auto some = sample(whole, sample_);
    const std::byte *some_base = base == nullptr ? nullptr : sample({base, whole.size()}, base_sample_).data();
    const std::size_t count = some.size() / itemsize;

    Transform best = transforms.front();
    std::array<double, most_planes> sizes{};
    double least = std::numeric_limits<double>::infinity();
    for (const Transform transform : transforms) {
        transform_ = transform;
        const std::byte *planes = split(some.data(), some_base, count);
        std::array<double, most_planes> found{};
        for (std::size_t i = 0; i < itemsize; ++i) {
            found[i] = coded_bytes({planes + i * count, count});
        }
        const double sum = std::accumulate(found.begin(), found.end(), 0.0);
        if (sum < least) {
            best = transform;
            least = sum;
            sizes = found;
        }
    }
    transform_ = best;
    const bool has_enough = itemsize == sizeof(std::uint32_t) && count >= least_indexed;
    is_indexed_ = may_index && has_enough && pack_indexed(whole, some, least);
    if (!is_indexed_) {
        const std::byte *planes = split(some.data(), some_base, count);
        const auto coders = best_coders(planes, count, {sizes.data(), itemsize}, is_whole(some, whole), 0);
        if (!is_whole(some, whole)) {
            const std::size_t all = whole.size() / itemsize;
            code_all(split(whole.data(), base, all), all, {coders.data(), itemsize}, 0);
        }
    }
    std::size_t nbytes = head_bytes + itemsize * row_bytes + block.bytes.size() - whole.size();
    for (std::size_t i = 0; i < itemsize; ++i) {
        nbytes += contents_[i].bytes.size();
    }
    return is_indexed_ ? nbytes + 1 + mantissas_.met().size_bytes() : nbytes;
}

// Index the elements, and code the two planes of that, if it makes a sample of them smaller than the `other` bytes
// which it would take; return whether it was done.
bool BlockPacker::pack_indexed(std::span<const std::byte> whole, std::span<const std::byte> some, double other) {
    static constexpr std::byte zero{};
    const std::size_t count = some.size() / sizeof(std::uint32_t);
    std::byte *planes = planes_.of(2 * count);
    mantissas_.forget();
    if (!mantissas_.index(some.data(), count, planes, planes + count)) {
        return false;
    }
    const std::array sizes = {coded_bytes({planes, count}), coded_bytes({planes + count, count})};
    // The share that a sample has of the table.
    const auto table =
        static_cast<double>(mantissas_.met().size_bytes() * some.size()) / static_cast<double>(whole.size());
    const double worth = mantissas_.are_halves() ? worth_indexing_halves : worth_indexing;
    if (sizes[0] + sizes[1] + table >= worth * other) {
        return false;
    }
    for (std::size_t i = 0; i < sizes.size(); ++i) {
        contents_[i].coding = Coding::constant;
        contents_[i].bytes = {&zero, 1};
    }
    const auto coders = best_coders(planes, count, sizes, is_whole(some, whole), sizes.size());
    if (is_whole(some, whole)) {
        return true;
    }
    const std::size_t all = whole.size() / sizeof(std::uint32_t);
    planes = planes_.of(2 * all);
    if (!mantissas_.index(whole.data(), all, planes, planes + all)) {
        return false;
    }
    code_all(planes, all, {coders.data(), sizes.size()}, sizes.size());
    return true;
}

// Code planes of `count` bytes each in the best way, as the contents from `first` on; return how.
std::array<BlockPacker::Coder, most_planes> BlockPacker::best_coders(const std::byte *planes, std::size_t count,
                                                                     std::span<const double> sizes, bool is_whole,
                                                                     std::size_t first) {
    std::array<Coder, most_planes> coders{};
    for (std::size_t i = 0; i < sizes.size(); ++i) {
        coders[i] = best_coder({planes + i * count, count}, sizes[i], is_whole, contents_[first + i]);
    }
    return coders;
}

// Code planes of `count` bytes each, as the contents from `first` on.
void BlockPacker::code_all(const std::byte *planes, std::size_t count, std::span<const Coder> coders,
                           std::size_t first) {
    for (std::size_t i = 0; i < coders.size(); ++i) {
        code({planes + i * count, count}, coders[i], contents_[first + i]);
    }
}

void BlockPacker::write(std::byte *into) const {
    *into++ = static_cast<std::byte>(version);
    *into++ = is_indexed_ ? static_cast<std::byte>(indexed_form) : static_cast<std::byte>(transform_);
    *into++ = static_cast<std::byte>(block_.itemsize);
    into = put_size(into, block_.bytes.size());
    for (std::size_t i = 0; i < block_.itemsize; ++i) {
        into = put_row(into, contents_[i].coding, contents_[i].bytes.size());
    }
    if (is_indexed_) {
        *into++ = static_cast<std::byte>(mantissas_.met().size());
        into = put_bytes(into, std::as_bytes(mantissas_.met()));
    }
    for (std::size_t i = 0; i < block_.itemsize; ++i) {
        into = put_bytes(into, contents_[i].bytes);
    }
    put_bytes(into, block_.bytes.last(block_.bytes.size() % block_.itemsize));
}

std::byte *BlockPacker::Memory::of(std::size_t nbytes) {
    if (nbytes > nbytes_ || !bytes_) {
        bytes_ = std::make_unique_for_overwrite<std::byte[]>(nbytes);
        nbytes_ = nbytes;
    }
    return bytes_.get();
}

// Return some of the elements, from all parts of a block; those of a small one are all of them, where they are.
std::span<const std::byte> BlockPacker::sample(std::span<const std::byte> data, Memory &memory) const {
    const std::size_t part = sample_part_elements * block_.itemsize;
    if (data.size() <= sample_parts * part) {
        return data;
    }
    const std::size_t gap = (data.size() / block_.itemsize - sample_part_elements) / (sample_parts - 1);
    std::byte *into = memory.of(sample_parts * part);
    for (std::size_t i = 0; i < sample_parts; ++i) {
        std::memcpy(into + i * part, data.data() + i * gap * block_.itemsize, part);
    }
    return {into, sample_parts * part};
}

const std::byte *BlockPacker::split(const std::byte *data, const std::byte *base, std::size_t count) {
    std::byte *planes = planes_.of(count * block_.itemsize);
    split_planes(data, base, count, block_.itemsize, transform_, planes);
    return planes;
}

// Code a plane in the way that makes it smallest, if by enough; return how. `size` is what Huffman's code makes of it,
// about; `is_whole` says that it is no sample of a larger one.
BlockPacker::Coder BlockPacker::best_coder(std::span<const std::byte> plane, double size, bool is_whole,
                                           Content &content) {
    // Repetitions are found also where all values are as frequent.
    Coder best = Coder::all_matches;
    code(plane, best, content);
    auto &[few, quads] = tried_;
    if (size < worth_coding * static_cast<double>(plane.size())) {
        code(plane, Coder::few_matches, few);
        if (worth_matches * static_cast<double>(few.bytes.size()) < static_cast<double>(content.bytes.size())) {
            best = Coder::few_matches;
            std::swap(content, few);
        }
    }
    if (content.coding != Coding::constant && is_below(content.bytes.size(), may_be_quads, plane.size())) {
        code(plane, Coder::quads, quads);
        // Of the block that a sample stands for their head is nothing.
        const std::size_t head = is_whole ? 0 : quads_head_bytes;
        if (is_below(quads.bytes.size() - std::min(head, quads.bytes.size()), worth_quads, content.bytes.size())) {
            std::swap(content, quads);
            return Coder::quads;
        }
    }
    if (is_below(content.bytes.size(), worth_coding, plane.size())) {
        return best;
    }
    code(plane, Coder::none, content);
    return Coder::none;
}

void BlockPacker::code(std::span<const std::byte> plane, Coder coder, Content &content) {
    content.coding = Coding::stored;
    content.bytes = plane;
    if (coder == Coder::none) {
        return;
    }
    if (plane.size() > 1 && is_constant(plane)) {
        content.coding = Coding::constant;
        content.bytes = plane.first(1);
        return;
    }
    if (coder == Coder::quads) {
        code_quads(plane, content);
        return;
    }
    FrameCoder &frames = coder == Coder::few_matches ? few_ : all_;
    std::byte *into = content.memory.of(FrameCoder::most_bytes(plane.size()));
    const std::size_t nbytes = frames.code(plane.data(), plane.size(), into);
    if (nbytes < plane.size()) {
        content.coding = Coding::frame;
        content.bytes = {into, nbytes};
    }
}

void BlockPacker::code_quads(std::span<const std::byte> plane, Content &content) {
    const std::size_t count = quads_of(plane.size());
    std::byte *quads = quads_.quads.of(count);
    std::byte *others = quads_.others.of(plane.size());
    const std::size_t found = gather_quads(plane.data(), plane.size(), quads, others);
    code({quads, count}, Coder::few_matches, quads_.parts[0]);
    code({others, found}, Coder::few_matches, quads_.parts[1]);
    const std::size_t nbytes = quads_head_bytes + quads_.parts[0].bytes.size() + quads_.parts[1].bytes.size();
    if (nbytes >= plane.size()) {
        return;
    }
    std::byte *const begin = content.memory.of(nbytes);
    std::byte *into = begin;
    for (const Content &part : quads_.parts) {
        into = put_row(into, part.coding, part.bytes.size());
    }
    into = put_size(into, found);
    for (const Content &part : quads_.parts) {
        into = put_bytes(into, part.bytes);
    }
    content.coding = Coding::quads;
    content.bytes = {begin, nbytes};
}

} // namespace dsh
